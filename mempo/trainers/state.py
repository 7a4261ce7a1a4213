"""What lies beside a policy's weights so that its training goes on: one format, whatever trainer wrote it.

``trainer.safetensors`` holds ``parameter/field`` of AdamW (step, exp_avg, exp_avg_sq), ``trainer.json`` the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mempo import storage
from mempo.engines import Trained

STATE, MOMENTS = "trainer.json", "trainer.safetensors"


class _State(Trained):
    step: NonNegativeInt
    torch_rng: str


def write(folder: Path, moments: dict[str, Tensor], *, policy_version: int, num_steps: int) -> None:
    """Add the state, with that of torch's random numbers, to a folder that is being filled."""
    rng = bytes(torch.get_rng_state().tolist()).hex()
    save_file(moments, folder / MOMENTS)
    storage.write_json(folder / STATE, {"policy_version": policy_version, "step": num_steps, "torch_rng": rng})


def restore(folder: Path) -> int:
    """Restore torch's random numbers; returns the number of steps made.

    0 where ``folder`` has no moments, as a published policy: training starts anew. Raises ``ValueError``.
    """
    if not (folder / MOMENTS).exists():
        torch.manual_seed(0)  # a process starts with any
        return 0
    path = folder / STATE
    if not path.exists():
        raise ValueError(f"{path} is missing beside {MOMENTS}")
    state = storage.read_as(_State, path)
    try:
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state.torch_rng)), dtype=torch.uint8))
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: torch_rng: {str(error).splitlines()[0]}") from error
    return state.step


def moments(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, field, value), read one at a time. Raises ``ValueError`` where they do not fit the weights."""
    path = folder / MOMENTS
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    with file:
        for key in file.keys():  # noqa: SIM118 - no mapping, though it has keys
            name, field = key.rsplit("/", 1)
            value = file.get_tensor(key)
            if name not in shapes or (field != "step" and value.shape != shapes[name]):
                raise ValueError(f"{path}: {key} does not belong to the weights beside it")
            yield name, field, value

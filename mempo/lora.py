"""LoRA (arXiv 2106.09685): W + alpha / rank * B A in the place of a frozen W. The one file that imports peft.

A policy trained so is a folder with the adapter alone, in peft's format, and ``base.json``, which names W's folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Linear, Parameter

from mempo import storage
from mempo.config import Lora

WEIGHTS, OPTIONS, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"


def is_adapter(folder: Path | str) -> bool:
    return (Path(folder) / OPTIONS).is_file()


def base_of(folder: Path | str) -> Path:
    """The folder of the whole weights under ``folder``: ``folder`` itself unless it holds an adapter.

    Raises ``ValueError`` naming both where the base is missing or no longer what the adapter was trained on.
    """
    folder = Path(folder)
    if not is_adapter(folder):
        return folder
    named = storage.read_json(folder / BASE) if (folder / BASE).is_file() else None
    if not isinstance(named, dict) or not {"path", "sha256"} <= named.keys():
        raise ValueError(f"{folder}: a LoRA adapter without a {BASE} that names the policy under it")
    base = Path(os.path.normpath(folder.resolve() / str(named["path"])))
    if not base.is_dir():
        raise ValueError(f"{folder}: the policy under this LoRA adapter, {base}, is missing")
    if base_hash(base) != named["sha256"]:
        raise ValueError(f"{folder}: the policy under this LoRA adapter, {base}, is not the one it was trained on")
    return base


def trainable(model: Any, policy: Path, options: Lora) -> dict[str, Parameter]:
    """The weights that training moves: all, or with a ``rank`` the adapter's, which is made where ``policy`` has none.

    Raises ``ValueError`` where ``policy`` holds an adapter of other options.
    """
    found = read_options(policy) if is_adapter(policy) else None
    if found and (found.rank, found.alpha) != (options.rank, options.alpha):
        asked = f"lora.rank {options.rank}, lora.alpha {options.alpha}"
        raise ValueError(f"{policy}: a LoRA adapter of rank {found.rank}, alpha {found.alpha}; asked were {asked}")
    if options.rank and not found:
        attach(model, options)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def attach(model: Any, options: Lora) -> Any:
    """``model`` with a fresh adapter, always of the same numbers: A random, B zero, so that nothing changes yet.

    All else is frozen. No dropout: the trainer's log-probs must equal the sampler's. float32 over weights of any type.
    """
    _check_targets(model, options)
    peft = _peft()
    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    config = peft.LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.eval()


def load(model: Any, folder: Path) -> Any:
    """``model``, which is the base, under the adapter in ``folder``. Raises ``ValueError`` where they do not fit."""
    attach(model, read_options(folder))
    saved = _read_weights(folder)
    own = {_saved_name(name): p.data for name, p in model.named_parameters() if p.requires_grad}
    wrong = {(n, v.shape) for n, v in saved.items()} ^ {(n, v.shape) for n, v in own.items()}
    if wrong:
        raise ValueError(f"{folder / WEIGHTS}: {min(wrong)[0]} does not belong to the policy under it")
    for name, value in saved.items():
        own[name].copy_(value)
    return model


def save(model: Any, weights: Mapping[str, Tensor], folder: Path, base: Path) -> None:
    """Into ``folder`` the adapter ``weights`` of ``model`` by their names there, and which policy lies under them.

    The path of ``base`` is written relative to ``folder``: a workspace may move as a whole.
    """
    if not base.is_dir():
        raise ValueError(f"lora.rank: {base} is no local folder, which a LoRA adapter needs under it")
    config = model.peft_config["default"].to_dict()
    config |= {"target_modules": sorted(config["target_modules"]), "inference_mode": True}
    storage.write_json(folder / OPTIONS, config)
    saved = {_saved_name(name): value.detach().cpu().contiguous() for name, value in weights.items()}
    save_file(saved, folder / WEIGHTS, metadata={"format": "pt"})
    path = os.path.relpath(base.resolve(), folder.resolve())
    storage.write_json(folder / BASE, {"path": path, "sha256": base_hash(base)})


def has_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config")


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Inside it ``model`` is its base, to the bit."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of the policy in ``folder``, an adapter, by their names in the base's files, one by one."""
    for file in _base_files(folder):
        yield from _merged(file, folder)


def write_merged(folder: Path, target: Path) -> None:
    """The policy in ``folder``, an adapter, as an ordinary folder ``target`` without the trainer's moments."""
    shutil.copytree(base_of(folder), target, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", OPTIONS, BASE))
    for file in _base_files(folder):
        save_file(dict(_merged(file, folder)), target / file.name, metadata={"format": "pt"})


def _base_files(folder: Path) -> list[Path]:
    """Raises ``ValueError`` where they lack a weight that the adapter moves: nothing would move it."""
    files = storage.weight_files(base_of(folder))
    layers: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as weights:
            layers |= set(map(_layer, weights.keys()))
    for name in sorted(_read_weights(folder)):
        if name.partition(".lora_")[0] not in layers:
            raise ValueError(f"{folder / WEIGHTS}: the files of the policy under it have no weight for {name}")
    return files


def _merged(file: Path, folder: Path) -> Iterator[tuple[str, Tensor]]:
    options, adapter = read_options(folder), _read_weights(folder)
    with safe_open(file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            value = weights.get_tensor(name)
            layer = _layer(name)
            if f"{layer}.lora_A.weight" in adapter:
                delta = adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
                value = (value + options.alpha / options.rank * delta).to(value.dtype)
            yield name, value


def read_options(folder: Path) -> Lora:
    """Raises ``ValueError`` where ``adapter_config.json`` is not that of a plain LoRA adapter."""
    config = storage.read_json(folder / OPTIONS)
    try:
        return Lora(rank=config["r"], alpha=config["lora_alpha"], targets=config["target_modules"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"{folder / OPTIONS}: not of a LoRA adapter: {error}") from error


def base_hash(base: Path) -> str:
    """``storage.content_hash`` of the folder, computed once while no file of it changes."""
    files = [(str(item), item.stat()) for item in sorted(base.rglob("*")) if item.is_file()]
    return _base_hash(base, tuple((name, found.st_size, found.st_mtime_ns) for name, found in files))


@lru_cache(maxsize=8)
def _base_hash(base: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    return storage.content_hash(base)


def _check_targets(model: Any, options: Lora) -> None:
    """Every name of ``lora.targets`` must be that of linear layers of the body; peft passes over those that are not."""
    if isinstance(options.targets, str):
        return
    head = model.get_output_embeddings()
    body = [f".{name}" for name, module in model.named_modules() if isinstance(module, Linear) and module is not head]
    for target in options.targets:
        if not any(name.endswith(f".{target}") for name in body):
            raise ValueError(f"lora.targets: {target!r} names no linear layer of the model's body")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS}: not a whole safetensors file: {error}") from error


def _layer(name: str) -> str:
    return f"base_model.model.{name.removesuffix('.weight')}"


def _saved_name(name: str) -> str:
    """``layer.lora_A.default.weight`` as peft and vLLM write it: ``base_model.model.layer.lora_A.weight``."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError("lora.rank: needs the package peft; pip install 'mempo[lora]' brings it") from error
    return peft

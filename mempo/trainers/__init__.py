"""Trainer: the only door to software that changes a policy's weights. Adapters import their library lazily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from mempo.config import Lora, LossConfig, Optim
from mempo.records import Sample
from mempo.runtime import Runtime

Objective = Literal["policy", "sft"]


class Trainer(Protocol):
    """One policy with its optimiser. ``step`` is one optimiser step on the exact weighted sum over ``samples``."""

    def step(self, samples: Sequence[Sample], *, objective: Objective = "policy") -> dict[str, float]:
        """``policy``: ``loss.policy_loss``; ``sft``: the sum of ``-weight * logprob`` over loss tokens. Statistics."""
        ...

    def alignment(self, first: Sequence[Sample], second: Sequence[Sample]) -> dict[str, float]:
        """Do the policy losses of two sets of samples pull the same way? Nothing is stepped.

        ``first_norm`` and ``second_norm`` of their gradients at the current weights, and ``cosine`` = g1 g2 / (|g1|
        |g2|), left out where a gradient is 0.
        """
        ...

    def save(self, folder: Path, *, policy_version: int) -> None:
        """An ordinary Hugging Face folder, or a LoRA adapter, plus the trainer's state; ``folder`` appears whole or not
        at all.
        """
        ...

    def close(self) -> None: ...


def open_trainer(
    policy: Path,
    optim: Optim,
    loss: LossConfig,
    runtime: Runtime,
    *,
    temperature: float = 1.0,
    adapter: Lora = Lora(),
) -> Trainer:
    """The trainer ``runtime.trainer`` over the folder ``policy``, with the optimiser state that lies there, if any.

    ``adapter``: what is trained, all weights or a LoRA adapter; ``policy`` is then one or the model under a new one.
    """
    if runtime.trainer == "torch":
        from mempo.trainers.torch_trainer import TorchTrainer

        return TorchTrainer(policy, optim, loss, runtime, temperature=temperature, adapter=adapter)
    if runtime.trainer == "deepspeed":
        from mempo.trainers.deepspeed_trainer import DeepSpeedTrainer

        return DeepSpeedTrainer(policy, optim, loss, runtime, temperature=temperature, adapter=adapter)
    raise ValueError(f"runtime.trainer: no trainer named {runtime.trainer!r}")

"""Engine: the only door to software that runs a policy forward. Adapters import their library lazily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mempo.packing import TokenTree
from mempo.records import FinishReason
from mempo.runtime import Runtime

STOP = ("</search>", "</answer>")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 switch the filters off."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = STOP


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens exactly as sampled, the stop text or end-of-turn token included, and their log-probabilities.

    ``logprobs`` are of the distribution that was sampled from (logits / temperature); of temperature 1 when greedy.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class Engine(Protocol):
    """Runs one policy version. ``generate`` may be awaited by many trajectories at once and batches them."""

    policy_version: int
    tokenizer: Any
    window: int

    async def generate(self, prompt_ids: list[int], *, seed: int, sampling: Sampling) -> Generation: ...

    def logprobs(
        self,
        trees: Sequence[TokenTree],
        *,
        temperature: float = 1.0,
        mode: Literal["packed", "padded"] = "packed",
    ) -> list[list[float]]:
        """Log-probability of each tree's target tokens given their ancestors, in the order of ``tree.targets``."""
        ...

    def close(self) -> None: ...


def open_engine(policy: Path, runtime: Runtime) -> Engine:
    """The engine ``runtime.engine`` over the Hugging Face folder ``policy``."""
    if runtime.engine == "hf":
        from mempo.engines.hf import HFEngine

        return HFEngine(policy, runtime)
    raise ValueError(f"runtime.engine: no engine named {runtime.engine!r}")


def engine_of(model: Any, tokenizer: Any) -> Engine:
    """Policy version 0 over a transformers model that the caller holds, in the mode (train, eval) it is in."""
    from mempo.engines.hf import HFEngine

    return HFEngine.of(model, tokenizer)

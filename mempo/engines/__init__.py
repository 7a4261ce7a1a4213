"""Engine: the only door to software that runs a policy forward. Adapters import their library lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, NonNegativeInt

from mempo import storage
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


class Scorer(Protocol):
    def logprobs(
        self,
        trees: Sequence[TokenTree],
        *,
        temperature: float = 1.0,
        mode: Literal["packed", "padded"] = "packed",
    ) -> list[list[float]]:
        """Log-probability of each tree's target tokens given their ancestors, in the order of ``tree.targets``."""
        ...


class Engine(Scorer, Protocol):
    """Runs one policy version. ``generate`` may be awaited by many trajectories at once and batches them.

    ``continuous``: requests join and leave a running batch. Where not, those made in one tick are one batch, and log-
    probabilities depend, by rounding, on who is in it.
    """

    continuous: bool
    policy_version: int
    tokenizer: Any
    window: int

    async def generate(self, prompt_ids: list[int], *, seed: int, sampling: Sampling) -> Generation: ...

    def load(self, policy: Path) -> None:
        """Run another policy from now on. Raises ``proof.StaleWeights`` where its probe says that it does not."""
        ...

    def base(self) -> Scorer | None:
        """The frozen policy under a LoRA adapter, without a second copy of its weights; None without an adapter."""
        ...

    def sleep(self) -> None:
        """Give back what a trainer on this machine needs; until the next ``load`` nothing else may be asked."""
        ...

    def close(self) -> None:
        """Give everything back and leave no process behind."""
        ...


@dataclass(frozen=True, slots=True)
class BaseScorer:
    """Scores by ``engine``, which runs the frozen policy under its adapter while it is ``within``."""

    engine: Engine
    within: Callable[[], AbstractContextManager[None]]

    def logprobs(
        self,
        trees: Sequence[TokenTree],
        *,
        temperature: float = 1.0,
        mode: Literal["packed", "padded"] = "packed",
    ) -> list[list[float]]:
        with self.within():
            return self.engine.logprobs(trees, temperature=temperature, mode=mode)


@contextmanager
def swapped(engine: Engine, policy: Path, other: Path) -> Iterator[None]:
    """Inside it ``engine`` runs ``other`` in the place of ``policy``."""
    engine.load(other)
    try:
        yield
    finally:
        engine.load(policy)


def open_engine(policy: Path, runtime: Runtime) -> Engine:
    """The engine ``runtime.engine`` over the Hugging Face folder ``policy``."""
    if runtime.engine == "hf":
        from mempo.engines.hf import HFEngine

        return HFEngine(policy, runtime)
    if runtime.engine == "vllm" and runtime.vllm.servers:
        from mempo.engines.vllm_server import VLLMServers

        return VLLMServers(policy, runtime)
    if runtime.engine == "vllm":
        from mempo.engines.vllm import VLLMEngine

        return VLLMEngine(policy, runtime)
    raise ValueError(f"runtime.engine: no engine named {runtime.engine!r}")


class Trained(BaseModel, strict=True):
    """What an engine reads of ``trainer.json``, which a trainer writes beside the weights."""

    policy_version: NonNegativeInt


def policy_version(folder: Path | str) -> int:
    """The version that a trainer wrote beside the weights; 0 for a model that was never trained here."""
    path = Path(folder) / "trainer.json"
    return storage.read_as(Trained, path).policy_version if path.exists() else 0


def engine_of(model: Any, tokenizer: Any) -> Engine:
    """Policy version 0 over a transformers model that the caller holds, in the mode (train, eval) it is in."""
    from mempo.engines.hf import HFEngine

    return HFEngine.of(model, tokenizer)

"""The engine of this process: one at a time, which runs one policy after another and rests while a trainer works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from mempo.engines import BaseScorer, Engine, Scorer, open_engine, swapped
from mempo.runtime import Runtime


@dataclass(slots=True)
class _Resident:
    """``policy``: what the engine runs; None while it sleeps, and where a change of policy failed."""

    engine: Engine | None = None
    runtime: Runtime | None = None
    policy: Path | None = None


_resident = _Resident()


def engine_of(policy: Path, runtime: Runtime) -> Engine:
    """The engine, running ``policy``; its log-probabilities are proven whenever it takes one."""
    if _resident.runtime != runtime:
        close()
    running, _resident.policy = _resident.policy, None
    if _resident.engine is None:
        _resident.engine, _resident.runtime = open_engine(policy, runtime), runtime
    elif running != policy:
        _resident.engine.load(policy)
    _resident.policy = policy
    return _resident.engine


def sleep() -> None:
    """What the engine holds is for others until it is asked for again."""
    _resident.policy = None
    if _resident.engine is not None:
        _resident.engine.sleep()


def close() -> None:
    """The engine gives everything back."""
    if _resident.engine is not None:
        _resident.engine.close()
    _resident.engine = _resident.runtime = _resident.policy = None


@contextmanager
def actor(policy: Path, runtime: Runtime) -> Iterator[Scorer]:
    """``policy`` in the trainer's own library, to recompute the log-probs that are trained on: vLLM, asked again, would
    repeat the sampler's. vLLM rests meanwhile.
    """
    if runtime.engine == "hf":
        yield engine_of(policy, runtime)
        return
    sleep()
    with closing(open_engine(policy, runtime.model_copy(update={"engine": "hf"}))) as opened:
        yield opened


def reference(policy: Path, first: Path, runtime: Runtime) -> Scorer:
    """``first`` beside the engine that runs ``policy``: what the engine runs, what lies under the adapter that it runs.

    Else a second ``hf``, which stays, and one vLLM in turns: another would claim the same memory.
    """
    engine = engine_of(policy, runtime)
    if policy == first:
        return engine
    if under := engine.base():
        return under
    if runtime.engine == "hf":
        return open_frozen(first, runtime)
    return BaseScorer(engine, partial(swapped, engine, policy, first))


@lru_cache(maxsize=1)
def open_frozen(policy: Path, runtime: Runtime) -> Engine:
    """An engine that runs one policy for good."""
    return open_engine(policy, runtime)

"""The proof that an engine runs the weights that a trainer saved: both score one prompt, and must agree.

A trainer writes ``probe.json`` into each policy folder; an engine is held against it whenever it takes a policy. An
engine that goes on with stale weights otherwise looks healthy, and trains on the wrong ratios.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, model_validator

from mempo import storage
from mempo.engines import Engine, policy_version
from mempo.packing import chain
from mempo.prompts import encode_text
from mempo.services import ServiceError

PROBE = "probe.json"
TEXT = (
    "What is the capital of the country whose largest city is Lyon; and in which year, 1806 or 1990, did it change?\n"
    "<mem>first capital Paris (48.9 N, 2.4 E)</mem><think>I need to search.</think><search>Lyon history</search>"
)
# Largest difference of a log-probability, in nats. Two programs in float32 differ by some 1e-5. bfloat16 keeps 8 bits:
# a logit of 20 is off by up to 0.06 each time that it is rounded, and layers add up. Other weights differ by nats.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


class StaleWeights(ServiceError):
    """An engine does not run the weights of the policy that it says it runs."""


class _Probe(BaseModel, extra="forbid", strict=True):
    token_ids: list[NonNegativeInt] = Field(min_length=2)
    logprobs: list[FiniteFloat]

    @model_validator(mode="after")
    def _lengths(self) -> _Probe:
        tokens, found = len(self.token_ids), len(self.logprobs)
        if found != tokens - 1:
            raise ValueError(f"{tokens} tokens have {tokens - 1} log-probabilities, not {found}")
        return self


def probe_ids(tokenizer: Any) -> list[int]:
    """The prompt that proves a policy: text of every kind that a policy reads, 40 to 120 tokens."""
    return encode_text(tokenizer, TEXT)


def write(folder: Path, token_ids: list[int], logprobs: list[float]) -> None:
    """``logprobs``: of ``token_ids[1:]``, each given all before it, at temperature 1, by the weights in ``folder``."""
    probe = storage.checked_as(_Probe, {"token_ids": token_ids, "logprobs": logprobs}, folder / PROBE)
    storage.write_json(folder / PROBE, probe.model_dump())


def record(folder: Path, engine: Engine) -> None:
    """``write`` what ``engine``, over the trainer's own model, gives."""
    token_ids = probe_ids(engine.tokenizer)[: engine.window - 1]  # what every engine can score
    write(folder, token_ids, engine.logprobs([chain(token_ids, 1)])[0])


def prove(engine: Engine, folder: Path, dtype: str) -> None:
    """Raises ``StaleWeights`` where the engine, in ``dtype``, does not score the folder's probe as its trainer did,
    and ``ValueError`` naming the probe's file where it is no probe of this tokenizer.

    A folder without a probe proves nothing and passes. Nor does the proof tell weights apart that differ by less than
    the tolerance: one careful step of a large policy in bfloat16 may. It is for weights that never changed at all, or
    changed in part, which the next steps make visible.
    """
    path = folder / PROBE
    if not path.exists():
        return
    probe = storage.read_as(_Probe, path)
    if unknown := set(probe.token_ids) - set(engine.tokenizer.get_vocab().values()):
        raise ValueError(f"{path}: token_ids: the tokenizer has no token {min(unknown)}")
    (found,) = engine.logprobs([chain(probe.token_ids, 1)])
    differences = [abs(a - b) for a, b in zip(found, probe.logprobs, strict=True)]
    largest = max(differences, key=lambda value: math.inf if math.isnan(value) else value)
    if not largest <= TOLERANCE[dtype]:
        raise StaleWeights(
            f"{folder}: the engine, at policy version {engine.policy_version}, does not run its weights (version "
            f"{policy_version(folder)}): log-probabilities of the probe differ by up to {largest:.3g}, "
            f"{TOLERANCE[dtype]:g} is allowed in {dtype}"
        )

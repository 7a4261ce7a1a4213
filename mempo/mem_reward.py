"""The memory reward: how probable is the gold answer given the memory alone, against given the whole history?

p = exp(mean log-probability of the kept answer tokens); reward = p_mem - p_full (arXiv 2603.00680). Everything here
reads stored log-probabilities in nats, so each variant is recomputed from files without a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal

from mempo.rewards import CJK, GoldenAnswers

Span = tuple[int, int]
Mask = Literal["independent", "shared", "none"]
Average = Literal["geometric", "arithmetic"]
Empty = Literal["one", "zero", "skip"]
ProbeKind = Literal["difference", "log_ratio", "p_mem"]
TurnKind = Literal["difference", "log_ratio", "p_mem", "compression", "increment"]

EPS = 1e-8
TAIL_TOKENS = 4  # what the published code takes "\n</answer>" to be


@dataclass(frozen=True, slots=True)
class MemoryReward:
    """p in [0, 1] of each side, None where nothing was kept and ``empty`` is ``skip``; then the reward is None too."""

    p_full: float | None
    p_mem: float | None
    reward: float | None
    kept_full: int
    kept_mem: int


def memory_reward(
    full_logprobs: Sequence[float],
    mem_logprobs: Sequence[float],
    answer_mask: Sequence[int],
    *,
    threshold: float = 0.5,
    mask: Mask = "independent",
    average: Average = "geometric",
    empty: Empty = "one",
    kind: ProbeKind = "difference",
    reward_cap: float | None = None,
) -> MemoryReward:
    """Reward of one turn from the A probe tokens' log-probs on both sides.

    Kept: answer tokens with log-prob > log(threshold), on each side by itself (``independent``), on both sides where
    either clears it (``shared``), or all (``none``). Nothing kept on a side: its p is 1, 0, or no reward (``empty``).
    Raises ``ValueError`` on unequal lengths and on NaN, which no comparison would otherwise catch.
    """
    pairs = [(f, m) for f, m, on in zip(full_logprobs, mem_logprobs, answer_mask, strict=True) if on]
    if any(math.isnan(logprob) for pair in pairs for logprob in pair):
        raise ValueError("NaN among the log-probabilities of a probe")
    kept = kept_masks(full_logprobs, mem_logprobs, answer_mask, threshold=threshold, mask=mask)
    full, mem = (list(compress(side, on)) for side, on in zip((full_logprobs, mem_logprobs), kept, strict=True))
    p_full, p_mem = _probability(full, average, empty), _probability(mem, average, empty)
    reward = None
    if p_full is not None and p_mem is not None:
        reward = _clip(_compare(p_full, p_mem, kind), reward_cap)
    return MemoryReward(p_full, p_mem, reward, len(full), len(mem))


def kept_masks(
    full_logprobs: Sequence[float],
    mem_logprobs: Sequence[float],
    answer_mask: Sequence[int],
    *,
    threshold: float,
    mask: Mask,
) -> tuple[list[int], list[int]]:
    """1 for the tokens that count after the history and after the memory, by the rules of ``memory_reward``."""
    floor = math.log(threshold) if threshold > 0 else -math.inf
    full, mem = ([mask == "none" or logprob > floor for logprob in side] for side in (full_logprobs, mem_logprobs))
    if mask == "shared":
        full = mem = [f or m for f, m in zip(full, mem, strict=True)]
    on_full, on_mem = ([int(on and kept) for on, kept in zip(answer_mask, side, strict=True)] for side in (full, mem))
    return on_full, on_mem


def turn_rewards(
    p_full: Sequence[float],
    p_mem: Sequence[float],
    mem_tokens: Sequence[int],
    context_tokens: Sequence[int],
    *,
    kind: TurnKind = "difference",
    length_penalty: float = 0.0,
    max_mem_tokens: int = 128,
    return_horizon: int = 0,
    discount: float = 1.0,
    reward_cap: float | None = None,
) -> list[float]:
    """Final rewards of one trajectory's scored turns, in order.

    ``compression``: (p_mem / p_full) / (mem_tokens / context_tokens), p_full at least 1e-8. ``increment``: p_mem minus
    that of the scored turn before (0 before the first). Then clipped to +-reward_cap, less length_penalty * mem_tokens
    / max_mem_tokens, and averaged over turns t .. t + return_horizon with weights discount^j, cut at the last turn.
    """
    if kind == "compression":
        sides = zip(p_full, p_mem, mem_tokens, context_tokens, strict=True)
        values = [p_m / max(p_f, EPS) * context / tokens for p_f, p_m, tokens, context in sides]
    elif kind == "increment":
        values = [p_m - before for p_m, before in zip(p_mem, [0.0, *p_mem[:-1]], strict=True)]
    else:
        values = [_compare(p_f, p_m, kind) for p_f, p_m in zip(p_full, p_mem, strict=True)]
    penalised = [
        _clip(value, reward_cap) - length_penalty * tokens / max_mem_tokens
        for value, tokens in zip(values, mem_tokens, strict=True)
    ]
    return [_weighted_mean(penalised[t : t + return_horizon + 1], discount) for t in range(len(penalised))]


def quantile_threshold(logprobs: Sequence[float], quantile: float) -> float:
    """The probability below which a share ``quantile`` of the answer tokens lies (linear between neighbours).

    ``logprobs``: answer tokens of the whole round, both sides together. None at all: 0, which keeps everything.
    """
    if not logprobs:
        return 0.0
    ranked = sorted(math.exp(logprob) for logprob in logprobs)
    below, part = divmod(quantile * (len(ranked) - 1), 1)
    lower, upper = ranked[int(below)], ranked[min(int(below) + 1, len(ranked) - 1)]
    return lower + part * (upper - lower)


def gold_text(golden_answers: GoldenAnswers) -> str:
    """What the probe asks for: the first alias of each objective, joined by ``"; "``, or ``；`` where one is CJK."""
    return _separator(golden_answers).join(_first_aliases(golden_answers))


def gold_spans(golden_answers: GoldenAnswers, offset: int = 0) -> list[Span]:
    """Character spans of the objectives in ``gold_text``, moved by ``offset`` (where that text begins in the probe)."""
    spans, width = [], len(_separator(golden_answers))
    for alias in _first_aliases(golden_answers):
        spans.append((offset, offset + len(alias)))
        offset += len(alias) + width
    return spans


def answer_mask(
    starts: Sequence[int], ends: Sequence[int], gold_spans: Sequence[Span], *, separators: bool = True
) -> list[int]:
    """1 for probe tokens whose characters ``[start, end)`` overlap the gold text, else 0.

    Without ``separators``, tokens that overlap nothing but the ``"; "`` between two objectives are 0 as well.
    """
    spans = [(gold_spans[0][0], gold_spans[-1][1])] if separators and gold_spans else gold_spans
    return [
        int(any(max(start, first) < min(end, last) for first, last in spans))
        for start, end in zip(starts, ends, strict=True)
    ]


def last_four_mask(num_probe_tokens: int, num_core_tokens: int) -> list[int]:
    """The published rule: the answer is the ``num_core_tokens`` tokens before the probe's last four.

    ``num_core_tokens`` counts the gold text tokenised by itself. Wrong where the gold's end merges with the line end
    (``Apple Inc.``, ``10%``): the mask is then shifted by a token.
    """
    end = num_probe_tokens - TAIL_TOKENS
    return [int(end - num_core_tokens <= i < end) for i in range(num_probe_tokens)]


def _probability(kept: Sequence[float], average: Average, empty: Empty) -> float | None:
    if not kept:
        return {"one": 1.0, "zero": 0.0, "skip": None}[empty]
    if average == "arithmetic":
        return math.fsum(math.exp(logprob) for logprob in kept) / len(kept)
    return math.exp(sum(kept) / len(kept))


def _compare(p_full: float, p_mem: float, kind: ProbeKind) -> float:
    if kind == "p_mem":
        return p_mem
    if kind == "log_ratio":
        return math.log(p_mem + EPS) - math.log(p_full + EPS)
    return p_mem - p_full


def _clip(value: float, cap: float | None) -> float:
    return value if cap is None else max(-cap, min(cap, value))


def _weighted_mean(values: Sequence[float], discount: float) -> float:
    weights = [discount**j for j in range(len(values))]
    return math.fsum(w * value for w, value in zip(weights, values, strict=True)) / math.fsum(weights)


def _first_aliases(golden_answers: GoldenAnswers) -> list[str]:
    return [entry if isinstance(entry, str) else entry[0] for entry in golden_answers]


def _separator(golden_answers: GoldenAnswers) -> str:
    return "；" if any(CJK.search(alias) for alias in _first_aliases(golden_answers)) else "; "

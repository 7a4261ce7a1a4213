"""From a round's stored log-probabilities to the memory reward of every turn, under any variant, without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mempo import mem_reward
from mempo.config import MemReward
from mempo.records import ProbeScore, TurnScore


@dataclass(frozen=True, slots=True)
class ProbeValue:
    """p_full and p_mem of one turn over all its probes, how many answer tokens they kept and could have kept.

    ``best`` and ``mean`` (``scoring.aliases``) speak of p alone: the counts are those of the first wording.
    """

    p_full: float | None
    p_mem: float | None
    kept_full: int
    kept_mem: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """1 for the probe tokens [A] of the answer, and for those of them that count after the history, the memory."""

    answer: list[int]
    full: list[int]
    mem: list[int]


def memory_rewards(
    turns: Sequence[Sequence[TurnScore]], options: MemReward, *, aliases: str = "first"
) -> tuple[list[list[ProbeValue | None]], list[list[float | None]]]:
    """Per trajectory and turn: the probe's value and the final reward; None where there is no signal."""
    threshold = round_threshold(turns, options)
    probes = [
        [_value(score, options, threshold, aliases) if score.reason is None else None for score in row] for row in turns
    ]
    return probes, [_final_rewards(scores, row, options) for scores, row in zip(turns, probes, strict=True)]


def probe_mask(probe: ProbeScore, options: MemReward) -> list[int]:
    """1 for the answer's tokens [A], by ``mem_reward.answer_tokens`` and ``separators``."""
    if options.answer_tokens == "last_four":
        return mem_reward.last_four_mask(len(probe.starts), probe.core_tokens)
    return mem_reward.answer_mask(probe.starts, probe.ends, probe.gold_spans, separators=options.separators)


def probe_value(
    probe: ProbeScore, options: MemReward, threshold: float, mem_logprobs: Sequence[float]
) -> mem_reward.MemoryReward:
    """p of one wording on both sides, ``mem_logprobs`` being the memory's or a look-ahead's."""
    return mem_reward.memory_reward(
        probe.full_logprobs,
        mem_logprobs,
        probe_mask(probe, options),
        threshold=threshold,
        mask=options.mask,
        average=options.average,
        empty=options.empty,
    )


def kept_tokens(scores: Sequence[TurnScore], options: MemReward) -> list[list[KeptTokens]]:
    """Per score and probe what ``memory_rewards`` counts. ``scores`` are the whole round's: the quantile is theirs."""
    threshold = round_threshold([scores], options)
    return [[_kept_tokens(probe, options, threshold) for probe in score.probes] for score in scores]


def _kept_tokens(probe: ProbeScore, options: MemReward, threshold: float) -> KeptTokens:
    answer = probe_mask(probe, options)
    full, mem = mem_reward.kept_masks(
        probe.full_logprobs, probe.mem_logprobs, answer, threshold=threshold, mask=options.mask
    )
    return KeptTokens(answer, full, mem)


def round_threshold(turns: Sequence[Sequence[TurnScore]], options: MemReward) -> float:
    """``threshold``, or the probability at ``quantile`` of all answer tokens of the round, both sides together."""
    if options.quantile is None:
        return options.threshold
    kept = [
        logprob
        for scores in turns
        for score in scores
        for probe in score.probes
        for side in (probe.full_logprobs, probe.mem_logprobs)
        for logprob, on in zip(side, probe_mask(probe, options), strict=True)
        if on
    ]
    return mem_reward.quantile_threshold(kept, options.quantile)


def _value(score: TurnScore, options: MemReward, threshold: float, aliases: str) -> ProbeValue:
    values = [probe_value(probe, options, threshold, probe.mem_logprobs) for probe in score.probes]
    p_mems = [_ahead(p, v, options, threshold) for p, v in zip(score.probes, values, strict=True)]
    p_full = _over_aliases([value.p_full for value in values], aliases)
    p_mem = _over_aliases(p_mems, aliases)
    asked = sum(probe_mask(score.probes[0], options))
    return ProbeValue(p_full, p_mem, values[0].kept_full, values[0].kept_mem, asked)


def _ahead(probe: ProbeScore, value: mem_reward.MemoryReward, options: MemReward, threshold: float) -> float | None:
    """Mean of p after the next 1..k observations with weights discount^j; the memory's own p where none follows."""
    after = [probe_value(probe, options, threshold, logprobs).p_mem for logprobs in probe.ahead_logprobs]
    found = [(options.discount**j, p) for j, p in enumerate(after, start=1) if p is not None]
    if not found:
        return value.p_mem
    return math.fsum(weight * p for weight, p in found) / math.fsum(weight for weight, _ in found)


def _over_aliases(values: Sequence[float | None], aliases: str) -> float | None:
    """Of the wordings that have a p: the first, the largest (``best``), or the mean."""
    if aliases == "first":
        return values[0]
    found = [value for value in values if value is not None]
    if not found:
        return None
    return max(found) if aliases == "best" else math.fsum(found) / len(found)


def _final_rewards(
    scores: Sequence[TurnScore], probes: Sequence[ProbeValue | None], options: MemReward
) -> list[float | None]:
    used: list[int] = []
    p_full: list[float] = []
    p_mem: list[float] = []
    for i, probe in enumerate(probes):
        if probe is not None and probe.p_full is not None and probe.p_mem is not None:
            used.append(i)
            p_full.append(probe.p_full)
            p_mem.append(probe.p_mem)
    final = mem_reward.turn_rewards(
        p_full,
        p_mem,
        [scores[i].mem_tokens for i in used],
        [scores[i].context_tokens for i in used],
        kind=options.kind,
        length_penalty=options.length_penalty,
        max_mem_tokens=options.max_mem_tokens,
        return_horizon=options.return_horizon,
        discount=options.discount,
        reward_cap=options.reward_cap,
    )
    by_turn = dict(zip(used, final, strict=True))
    return [by_turn.get(i) for i in range(len(scores))]

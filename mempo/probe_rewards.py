"""From a round's stored log-probabilities to the memory reward of every turn, under any variant, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mempo import mem_reward
from mempo.config import MemReward
from mempo.records import TurnScore


@dataclass(frozen=True, slots=True)
class ProbeValue:
    """p_full and p_mem of one turn, and how many answer tokens they could have kept."""

    value: mem_reward.MemoryReward
    answer_tokens: int


def memory_rewards(
    turns: Sequence[Sequence[TurnScore]], options: MemReward
) -> tuple[list[list[ProbeValue | None]], list[list[float | None]]]:
    """Per trajectory and turn: the probe's value and the final reward; None where there is no signal."""
    masks = [[_mask(score, options) if score.reason is None else [] for score in row] for row in turns]
    threshold = options.threshold
    if options.quantile is not None:
        kept = [
            logprob
            for scores, row in zip(turns, masks, strict=True)
            for score, mask in zip(scores, row, strict=True)
            for side in (score.full_logprobs, score.mem_logprobs)
            for logprob, on in zip(side, mask, strict=True)
            if on
        ]
        threshold = mem_reward.quantile_threshold(kept, options.quantile)
    probes: list[list[ProbeValue | None]] = []
    finals: list[list[float | None]] = []
    for scores, row in zip(turns, masks, strict=True):
        found = [
            _probe(score, mask, options, threshold) if score.reason is None else None
            for score, mask in zip(scores, row, strict=True)
        ]
        probes.append(found)
        finals.append(_final_rewards(scores, found, options))
    return probes, finals


def _mask(score: TurnScore, options: MemReward) -> list[int]:
    if options.answer_tokens == "last_four":
        return mem_reward.last_four_mask(len(score.probe_ids), score.core_tokens)
    return mem_reward.answer_mask(score.probe_starts, score.probe_ends, score.gold_spans, separators=options.separators)


def _probe(score: TurnScore, mask: list[int], options: MemReward, threshold: float) -> ProbeValue:
    # compression and increment are decided over a trajectory's turns, by turn_rewards, from p_mem and p_full.
    kind = options.kind if options.kind in ("log_ratio", "p_mem") else "difference"
    value = mem_reward.memory_reward(
        score.full_logprobs,
        score.mem_logprobs,
        mask,
        threshold=threshold,
        mask=options.mask,
        average=options.average,
        empty=options.empty,
        kind=kind,
    )
    return ProbeValue(value, sum(mask))


def _final_rewards(
    scores: Sequence[TurnScore], probes: Sequence[ProbeValue | None], options: MemReward
) -> list[float | None]:
    used: list[int] = []
    p_full: list[float] = []
    p_mem: list[float] = []
    for i, probe in enumerate(probes):
        if probe is not None and probe.value.p_full is not None and probe.value.p_mem is not None:
            used.append(i)
            p_full.append(probe.value.p_full)
            p_mem.append(probe.value.p_mem)
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

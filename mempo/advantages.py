"""Rewards become advantages: how much better than its peers was a trajectory, and how much better a memory?

Token advantage = outcome advantage on every response token + mem_weight * memory advantage on the ``<mem>`` tokens
(arXiv 2603.00680). Sums are exact (``fsum``), so the order of trajectories cannot change a value.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal

Pool = Literal["question", "question_turn", "batch"]
Single = Literal["raw", "zero"]
Gate = Literal["none", "outcome_nonnegative", "outcome_correct"]
Aggregation = Literal["token-mean", "turn-mean", "trajectory-mean", "constant"]

EPS = 1e-6


def outcome_advantages(
    scores: Sequence[float | None], groups: Sequence[str], *, normalize_std: bool = True
) -> list[float]:
    """(score - group mean) / (unbiased group std + 1e-6), or score - mean; a group of one has mean 0 and std 1.

    Equal scores give exactly 0. A score of None (no outcome: the tool failed) is in no group and gets 0.
    """
    advantages = [0.0] * len(scores)
    for members in _members(scores, groups).values():
        values = [value for _, value in members]
        mean, std = _mean_std(values)
        scale = std + EPS if normalize_std else 1.0
        for index, value in members:
            advantages[index] = (value - mean) / scale
    return advantages


def memory_advantages(
    rewards: Sequence[Sequence[float | None]],
    groups: Sequence[str],
    *,
    turns: Sequence[Sequence[int]] | None = None,
    pool: Pool = "question",
    single: Single = "raw",
    std_floor: float = 0.0,
    normalize_std: bool = True,
) -> list[list[float]]:
    """(reward - pool mean) / (unbiased pool std + 1e-6), or reward - mean, for each segment of each trajectory.

    Pools: all rewards of a question (``question``), of a question at one turn index (``question_turn``, needs
    ``turns``, shaped like ``rewards``), of the batch. A pool of one keeps reward / (1 + 1e-6) (``raw``, published) or
    gives 0 (``zero``). Equal rewards give exactly 0, and so does a pool with std < ``std_floor``. A reward of None is
    in no pool and gets 0.
    """
    flat = [reward for row in rewards for reward in row]
    members = _members(flat, _pool_keys(rewards, groups, turns, pool))
    advantages = [0.0] * len(flat)
    for pooled in members.values():
        values = [value for _, value in pooled]
        mean, std = _mean_std(values)
        if (len(values) == 1 and single == "zero") or (len(values) > 1 and std < std_floor):
            continue
        scale = std + EPS if normalize_std else 1.0
        for index, value in pooled:
            advantages[index] = (value - mean) / scale
    remaining = iter(advantages)
    return [[next(remaining) for _ in row] for row in rewards]


def gates(outcomes: Sequence[float], outcome_advantages: Sequence[float], *, rule: Gate = "none") -> list[float]:
    """1 or 0 for each trajectory: whether its memory advantages count.

    ``outcome_nonnegative``: outcome advantage >= 0. ``outcome_correct``: outcome reward 1.
    """
    if rule == "outcome_nonnegative":
        return [float(advantage >= 0.0) for advantage in outcome_advantages]
    if rule == "outcome_correct":
        return [float(outcome >= 1.0) for outcome in outcomes]
    return [1.0] * len(outcomes)


def unit_variance(
    outcome_advantages: Sequence[float],
    memory_advantages: Sequence[Sequence[float]],
    rewards: Sequence[Sequence[float | None]],
) -> list[list[float]]:
    """What to add to the outcome advantage so that the sum on segments has a root mean square of 1.

    ``memory_advantages`` come weighted and gated. Over segments with a reward: sum = outcome + memory, rms = sqrt(mean
    sum^2); the result is sum / rms - outcome. Others, and all where rms is 0, stay as they are.
    """
    sums = [
        outcome + memory
        for outcome, row, given in zip(outcome_advantages, memory_advantages, rewards, strict=True)
        for memory, reward in zip(row, given, strict=True)
        if reward is not None
    ]
    rms = math.sqrt(math.fsum(value**2 for value in sums) / len(sums)) if sums else 0.0
    if rms == 0.0:
        return [list(row) for row in memory_advantages]
    return [
        [
            (outcome + memory) / rms - outcome if reward is not None else memory
            for memory, reward in zip(row, given, strict=True)
        ]
        for outcome, row, given in zip(outcome_advantages, memory_advantages, rewards, strict=True)
    ]


def span_advantages(num_tokens: int, spans: Sequence[tuple[int, int]], values: Sequence[float]) -> list[float]:
    """[num_tokens]: each value on the tokens ``[start, end)`` of its span, 0 elsewhere."""
    tokens = [0.0] * num_tokens
    for (start, end), value in zip(spans, values, strict=True):
        tokens[start:end] = [value] * (end - start)
    return tokens


def token_advantages(
    outcome_advantage: float,
    memory_advantages: Sequence[float],
    loss_mask: Sequence[int],
    *,
    mem_weight: float = 1.0,
    gate: float = 1.0,
) -> list[float]:
    """[T]: outcome + gate * mem_weight * memory on tokens of the loss, 0 on the others."""
    scale = gate * mem_weight
    return [
        outcome_advantage + scale * memory if on else 0.0
        for memory, on in zip(memory_advantages, loss_mask, strict=True)
    ]


def token_weights(
    num_tokens: Sequence[int],
    trajectory_ids: Sequence[str],
    *,
    aggregation: Aggregation = "token-mean",
    max_response_tokens: int,
) -> list[float]:
    """The weight of each loss token of each sample (a turn), over the whole update batch.

    ``token-mean``: 1 / all tokens. ``turn-mean``: 1 / (samples * tokens of the sample). ``trajectory-mean``:
    1 / (trajectories * tokens of the trajectory); both favour tokens of short ones. ``constant``: 1 / (samples *
    max_response_tokens). A sample of 0 tokens (tool failed, dropped) gets 0 and is in no denominator.
    """
    samples = sum(n > 0 for n in num_tokens)
    of_trajectory: Counter[str] = Counter()
    for n, trajectory in zip(num_tokens, trajectory_ids, strict=True):
        if n > 0:
            of_trajectory[trajectory] += n
    total = of_trajectory.total()

    def denominator(n: int, trajectory: str) -> int:
        if aggregation == "token-mean":
            return total
        if aggregation == "turn-mean":
            return samples * n
        if aggregation == "trajectory-mean":
            return len(of_trajectory) * of_trajectory[trajectory]
        return samples * max_response_tokens

    rows = zip(num_tokens, trajectory_ids, strict=True)
    return [1.0 / denominator(n, trajectory) if n > 0 else 0.0 for n, trajectory in rows]


def _members(values: Sequence[float | None], keys: Sequence[Hashable]) -> dict[Hashable, list[tuple[int, float]]]:
    """(index, value) of the values that are there, by key."""
    members: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for index, (value, key) in enumerate(zip(values, keys, strict=True)):
        if value is not None:
            members[key].append((index, value))
    return members


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation; (0, 1) for one value. Equal values: themselves and 0, without rounding."""
    if len(values) == 1:
        return 0.0, 1.0
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _pool_keys(
    rewards: Sequence[Sequence[float | None]],
    groups: Sequence[str],
    turns: Sequence[Sequence[int]] | None,
    pool: Pool,
) -> list[Hashable]:
    if pool == "batch":
        return [None for row in rewards for _ in row]
    if pool == "question":
        return [group for row, group in zip(rewards, groups, strict=True) for _ in row]
    if turns is None:
        raise ValueError("pool 'question_turn' needs the turn index of every reward: pass turns")
    return [
        (group, turn)
        for row, group, indices in zip(rewards, groups, turns, strict=True)
        for _, turn in zip(row, indices, strict=True)
    ]

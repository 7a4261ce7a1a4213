"""Memory rewards become what ``<mem>`` tokens carry: pooled by the options, then weighted, gated and scaled."""

from __future__ import annotations

from collections.abc import Sequence

from mempo import advantages
from mempo.config import Advantage


def memory_signal(
    rewards: Sequence[Sequence[float | None]],
    groups: Sequence[str],
    options: Advantage,
    *,
    outcomes: Sequence[float],
    outcome_advantages: Sequence[float],
    weight: float,
    turns: Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """Per trajectory and segment: the normalised memory advantage, and what its tokens get beside the outcome's.

    The latter is weight * gate * advantage, under ``unit_variance`` rescaled with the outcome's. ``weight`` is that of
    the round.
    """
    normalised = advantages.memory_advantages(
        rewards,
        groups,
        turns=turns,
        pool=options.pool,
        single=options.single,
        std_floor=options.std_floor,
        normalize_std=options.mem_normalize_std,
    )
    gates = advantages.gates(outcomes, outcome_advantages, rule=options.gate)
    added = [[weight * gate * value for value in row] for gate, row in zip(gates, normalised, strict=True)]
    if options.unit_variance:
        added = advantages.unit_variance(outcome_advantages, added, rewards)
    return normalised, added

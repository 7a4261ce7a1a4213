"""Does the reward depend on the turn by itself? Then a pool over turns pays for writing early or late."""

from __future__ import annotations

import pandas as pd

MEANS = ["p_full", "p_mem", "mem_reward", "mem_advantage", "quality", "mem_tokens"]


def figures(rows: pd.DataFrame) -> dict[str, float]:
    """Mean normalised reward of each turn, and ``turn_share``: the share of its variance that lies between turns.

    turn_share = sum over turns of n_t (mean_t - mean)^2 / sum of (a - mean)^2.
    """
    scored = rows[rows["mem_reward"].notna()]
    advantages = scored["mem_advantage"]
    by_turn = advantages.groupby(scored["turn"])
    found = {f"mem_advantage/turn_{turn}": float(mean) for turn, mean in by_turn.mean().items()}
    total = float(((advantages - advantages.mean()) ** 2).sum())
    between = float(((by_turn.transform("mean") - advantages.mean()) ** 2).sum())
    return found | ({"turn_share": between / total} if total > 0 else {})


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Means by turn over the scored segments, ``n`` of them."""
    by_turn = rows[rows["mem_reward"].notna()].groupby("turn")
    return pd.concat([by_turn.size().rename("n"), by_turn[MEANS].mean()], axis="columns").reset_index()

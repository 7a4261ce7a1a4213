"""Two advantages meet on ``<mem>`` tokens: which is larger, do they agree, and which way does their sum point?

Rows are segments with a reward, each counted once. ``mem_weight`` and the gate are in the memory's part; a later
division of the sum (``advantage.unit_variance``) changes no sign and is not.
"""

from __future__ import annotations

from typing import get_args

import pandas as pd

from mempo import advantages, stats
from mempo.advantages import Gate

GATES: tuple[Gate, ...] = get_args(Gate)
QUADRANTS = {"right_above": (True, True), "right_below": (True, False),
             "wrong_above": (False, True), "wrong_below": (False, False)}  # fmt: skip


def memory_part(rows: pd.DataFrame, gate: Gate) -> pd.Series[float]:
    """gate * mem_weight * memory advantage."""
    factors = advantages.gates(rows["score"].tolist(), rows["outcome_advantage"].tolist(), rule=gate)
    return rows["mem_advantage"] * rows["mem_weight"] * factors


def figures(rows: pd.DataFrame, gate: Gate) -> dict[str, float]:
    """Population std of both parts and their correlation; of each quadrant its share and how often the sum is > 0."""
    rows = rows[rows["mem_reward"].notna()]
    memory = memory_part(rows, gate)
    found = {
        "balance/outcome_std": float(rows["outcome_advantage"].std(ddof=0)),
        "balance/memory_std": float(memory.std(ddof=0)),
        "balance/correlation": stats.correlation(rows["outcome_advantage"], memory),
    }
    positive = rows["outcome_advantage"] + memory > 0
    for name, inside in _quadrants(rows).items():
        found[f"quadrant/{name}"] = float(inside.mean())
        found[f"quadrant/{name}_positive"] = float(positive[inside].mean())
    return found


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a gate: std of the outcome's and the memory's part, and their correlation."""
    rows = rows[rows["mem_reward"].notna()]
    found = []
    for gate in GATES if len(rows) else ():
        memory, outcome = memory_part(rows, gate), rows["outcome_advantage"]
        row = {"gate": gate, "outcome_std": outcome.std(ddof=0), "memory_std": memory.std(ddof=0)}
        found.append(row | {"correlation": stats.correlation(outcome, memory)})
    return pd.DataFrame(found)


def quadrants(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a quadrant: segments, mean of each part without a gate, and the share of sums > 0 under every gate."""
    rows = rows[rows["mem_reward"].notna()]
    parts = {gate: memory_part(rows, gate) for gate in GATES}
    found = []
    for name, inside in _quadrants(rows).items() if len(rows) else ():
        outcome = rows["outcome_advantage"][inside]
        row = {
            "quadrant": name,
            "n": int(inside.sum()),
            "outcome": outcome.mean(),
            "memory": parts["none"][inside].mean(),
        }
        found.append(row | {f"gate_{gate}": (outcome + part[inside] > 0).mean() for gate, part in parts.items()})
    return pd.DataFrame(found)


def _quadrants(rows: pd.DataFrame) -> dict[str, pd.Series[bool]]:
    """Outcome reward 1 or less, memory reward above its pool's mean or not: a pool's mean has the advantage 0."""
    right, above = rows["score"] >= 1.0, rows["mem_advantage"] > 0.0
    return {name: (right == is_right) & (above == is_above) for name, (is_right, is_above) in QUADRANTS.items()}

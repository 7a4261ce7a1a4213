"""Where p_mem and p_full vary: between questions, between trajectories of a question, between turns of a trajectory.

Var(p_mem - p_full) = Var(p_mem) + Var(p_full) - 2 Cov. The mean of a question's pool takes the question's part out of
any reward; subtracting p_full helps only as far as, within a question, 2 Cov is more than Var(p_full).
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

LEVELS = {"question": ["round", "question_id"], "trajectory": ["round", "question_id", "sample_index"]}
PARTS = [*LEVELS, "turn"]


def split(rows: pd.DataFrame, first: str, second: str) -> dict[str, float]:
    """The population covariance of two columns as the sum of three parts, in the units of their product.

    question: mean over rows of the product of both columns' (question mean - mean); trajectory: of (trajectory mean -
    question mean); turn: of (value - trajectory mean). Cross terms are 0, so the parts add up to the covariance.
    """
    products = [a * b for a, b in zip(_deviations(rows, first), _deviations(rows, second), strict=True)]
    return {part: float(product.mean()) for part, product in zip(PARTS, products, strict=True)}


def _deviations(rows: pd.DataFrame, column: str) -> list[pd.Series[float]]:
    """Of each level's mean from the mean of the level above, and of the value from its trajectory's mean."""
    values = rows[column].astype(float)
    steps = [rows.groupby(keys)[column].transform("mean") for keys in LEVELS.values()]
    above = [values * 0.0 + values.mean(), *steps]
    return [below - upper for below, upper in zip([*steps, values], above, strict=True)]


def parts(rows: pd.DataFrame) -> dict[str, dict[str, float]]:
    """``split`` of p_mem, p_full, twice their covariance (``cov2``) and their difference, over the turns with both."""
    both = rows[rows["p_mem"].notna() & rows["p_full"].notna()]
    if both.empty:
        return {}
    mem, full = split(both, "p_mem", "p_mem"), split(both, "p_full", "p_full")
    twice = {part: 2.0 * value for part, value in split(both, "p_mem", "p_full").items()}
    rest = {part: mem[part] + full[part] - twice[part] for part in PARTS}
    return {"p_mem": mem, "p_full": full, "cov2": twice, "difference": rest}


def figures(rows: pd.DataFrame) -> dict[str, float]:
    """All parts of p_mem, p_full, cov2; ``removed`` = 1 - Var(p_mem - p_full) / Var(p_mem) within questions.

    Below 0 where subtracting p_full adds variance.
    """
    found = parts(rows)
    flat = {
        f"variance/{name}/{part}": value
        for name, row in found.items() if name != "difference" for part, value in row.items()
    }  # fmt: skip
    if found and _within(found["p_mem"]) > 1e-12:  # less is rounding
        flat["variance/removed"] = 1.0 - _within(found["difference"]) / _within(found["p_mem"])
    return flat


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row each for p_mem, p_full, cov2 and the difference: the three parts and their sum."""
    found = [{"of": name, **row, "total": sum(row.values())} for name, row in parts(rows).items()]
    return pd.DataFrame(found)


def _within(row: Mapping[str, float]) -> float:
    return row["trajectory"] + row["turn"]

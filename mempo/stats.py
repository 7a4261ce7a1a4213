"""Summaries of a distribution for people and for the tracker."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


def summary(values: Iterable[float | None]) -> dict[str, float]:
    """p05 p25 p50 p75 p95 (linear between neighbours), mean, unbiased std (0 for one value), n; None is left out.

    No value at all: n alone, so that nothing is plotted where nothing was measured.
    """
    found = np.array([value for value in values if value is not None], dtype=np.float64)
    if found.size == 0:
        return {"n": 0.0}
    quantiles = np.quantile(found, list(QUANTILES.values()))
    figures = {name: float(value) for name, value in zip(QUANTILES, quantiles, strict=True)}
    std = float(found.std(ddof=1)) if found.size > 1 else 0.0
    return figures | {"mean": float(found.mean()), "std": std, "n": float(found.size)}


def correlation(first: Iterable[float], second: Iterable[float]) -> float:
    """Pearson's, over the pairs that have both; NaN with fewer than two pairs or where a side does not vary."""
    pairs = np.array([pair for pair in zip(first, second, strict=True) if not any(map(math.isnan, pair))], dtype=float)
    if len(pairs) < 2 or (pairs == pairs[0]).all(axis=0).any():
        return math.nan
    return float(np.corrcoef(pairs.T)[0, 1])

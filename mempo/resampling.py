"""What resampling says of a difference: intervals and p-values that ask for no bell curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, its 95 % percentile interval, and the two-sided p-value against ``nothing``."""

    value: float
    low: float
    high: float
    p_value: float


MIN_SEEDS = 5  # of fewer, resampling tells no spread


def estimate(value: float, draws: np.ndarray, nothing: float, num_seeds: int) -> Estimate:
    """``value`` with the spread of its resampled ``draws``; p = twice the smaller share on one side of ``nothing``.

    p is at least 1 / len(draws): so many draws cannot tell a smaller one. Of fewer than ``MIN_SEEDS`` seeds p is NaN.
    """
    # Interpolating between two infinite draws would be NaN.
    low, high = np.quantile(draws, [0.025, 0.975], method="inverted_cdf")
    share = min((draws <= nothing).mean(), (draws >= nothing).mean())
    p_value = float(min(1.0, max(2 * share, 1 / len(draws)))) if num_seeds >= MIN_SEEDS else np.nan
    return Estimate(value, float(low), float(high), p_value)


def resampled_medians(values: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """[num_samples] medians of ``values`` [seeds] drawn with replacement; infinite values are as good as any other."""
    drawn = np.random.default_rng(seed).choice(values, size=(num_samples, len(values)))
    medians: np.ndarray = np.median(drawn, axis=1)
    return medians


def resampled_means(values: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """[num_samples] means of ``values`` [seeds, questions], rows and columns drawn with replacement."""
    random = np.random.default_rng(seed)
    rows, columns = values.shape
    row_weights = random.multinomial(rows, np.full(rows, 1 / rows), size=num_samples) / rows
    column_weights = random.multinomial(columns, np.full(columns, 1 / columns), size=num_samples) / columns
    means: np.ndarray = ((row_weights @ values) * column_weights).sum(axis=1)
    return means


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: sorted p times (number left), never falling, at most 1.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = largest
    return corrected


def compare(
    tables: Mapping[str, pd.DataFrame], baseline: str, *, num_samples: int = 10_000, seed: int = 0
) -> dict[str, Estimate]:
    """Every variant's EM minus ``baseline``'s: paired bootstrap, seeds and questions both drawn anew (crossed).

    Only seeds that both have count.
    """
    found = {}
    for variant, table in tables.items():
        seeds = table.index.intersection(tables[baseline].index)
        if variant != baseline and len(seeds):
            gaps = (table.loc[seeds] - tables[baseline].loc[seeds, table.columns]).to_numpy(dtype=float)
            found[variant] = estimate(float(gaps.mean()), resampled_means(gaps, num_samples, seed), 0.0, len(seeds))
    return found


def cost_ratios(
    spent: pd.DataFrame, baseline: str, measure: str, *, num_samples: int = 10_000, seed: int = 0
) -> dict[str, Estimate]:
    """Median over seeds of one mix's cost to the target, divided by that of ``baseline`` at the same seed.

    One side never there: 0 or infinity. Neither: the seed is left out; no seed left: the variant is.
    """
    costs = spent.pivot(index="seed", columns="variant", values=measure)
    found = {}
    for variant in costs.columns.drop(baseline):
        mine, theirs = costs[variant].to_numpy(), costs[baseline].to_numpy()
        told = np.isfinite(mine) | np.isfinite(theirs)
        if told.any():
            ratios = mine[told] / theirs[told]
            draws = resampled_medians(ratios, num_samples, seed)
            found[str(variant)] = estimate(float(np.median(ratios)), draws, 1.0, len(ratios))
    return found


def interval(table: pd.DataFrame, *, num_samples: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
    """Mean EM of one variant and its 95 % interval over seeds and questions."""
    values = table.to_numpy(dtype=float)
    low, high = np.quantile(resampled_means(values, num_samples, seed), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)

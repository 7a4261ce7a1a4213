"""What resampling says of a difference: intervals and p-values that ask for no bell curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    medians: np.ndarray = np.quantile(drawn, 0.5, axis=1, method="inverted_cdf")
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

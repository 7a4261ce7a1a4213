"""Summaries of a distribution."""

from __future__ import annotations

import pytest

from mempo.stats import summary


def test_quantiles_mean_and_spread() -> None:
    found = summary([4.0, None, 1.0, 2.0, 3.0, 0.0])
    # five values 0..4: quantile q lies at 4 q; mean 2; unbiased variance (4 + 1 + 0 + 1 + 4) / 4 = 2.5
    assert found == pytest.approx(
        {"p05": 0.2, "p25": 1.0, "p50": 2.0, "p75": 3.0, "p95": 3.8, "mean": 2.0, "std": 2.5**0.5, "n": 5.0}
    )


def test_one_value_and_none() -> None:
    assert summary([0.3]) == pytest.approx(
        {"p05": 0.3, "p25": 0.3, "p50": 0.3, "p75": 0.3, "p95": 0.3, "mean": 0.3, "std": 0.0, "n": 1.0}
    )
    assert summary([None]) == {"n": 0.0}

"""Importance weights against the sampler, and the figures that say how far it is from the policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mempo.mismatch import Mismatch, mismatch_figures, refuse_mismatch, sampler_weights

logprob = st.floats(-50, 0)
pairs = st.lists(st.tuples(logprob, logprob), max_size=12)
caps = st.floats(1, 100)
# The policy's ratios to the sampler: 1/2, 1, 3.
OLD, SAMPLING = [-1 - math.log(2), -1.0, -1.0], [-1.0, -1.0, -1 - math.log(3)]


@pytest.mark.parametrize(
    ("correction", "cap", "expected"),
    [
        ("none", 2.0, [1, 1, 1]),
        ("token", 2.0, [0.5, 1, 2]),
        ("token", 5.0, [0.5, 1, 3]),
        ("sequence", 2.0, [1.5, 1.5, 1.5]),  # 1/2 * 1 * 3
        ("sequence", 1.2, [1.2, 1.2, 1.2]),
    ],
)
def test_weights_by_hand(correction: Any, cap: float, expected: list[float]) -> None:
    assert sampler_weights(OLD, SAMPLING, correction=correction, cap=cap) == pytest.approx(expected)
    assert sampler_weights([], [], correction=correction, cap=cap) == []


@given(pairs, caps, st.sampled_from(["none", "token", "sequence"]))
def test_weights_are_positive_and_at_most_the_cap(rows: Any, cap: float, correction: Any) -> None:
    old, sampling = [a for a, _ in rows], [b for _, b in rows]
    found = sampler_weights(old, sampling, correction=correction, cap=cap)
    assert len(found) == len(rows) and all(0 < weight <= cap for weight in found)
    if correction == "sequence":
        assert len(set(found)) <= 1
    if correction == "token":
        # a token's weight is its own
        assert found == [sampler_weights([a], [b], correction="token", cap=cap)[0] for a, b in rows]
    assert sampler_weights(old, old, correction=correction, cap=cap) == [1.0] * len(rows)


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_extreme_ratios_stay_finite_and_nan_is_not_hidden(correction: Any) -> None:
    def weights(old: list[float]) -> list[float]:
        return sampler_weights(old, [-1.0] * len(old), correction=correction, cap=2.0)

    assert weights([1e4]) == [2.0]
    assert weights([-math.inf]) == [math.exp(-20)]
    assert math.isnan(weights([-1.0, math.nan])[1])
    found = mismatch_figures([1e4, -math.inf], [-1.0, -1.0], cap=2.0)
    assert found == pytest.approx(
        {"kl": (math.exp(20) - 21 + math.exp(-20) + 19) / 2, "ratio_max": math.exp(20), "above_cap": 0.5}
    )


def test_figures_by_hand() -> None:
    # k3 of 1/2, 1, 3: 0.5 - 1 + log 2 = 0.1931, 0, 3 - 1 - log 3 = 0.9014
    kl = (0.5 - 1 + math.log(2) + 3 - 1 - math.log(3)) / 3
    assert mismatch_figures(OLD, SAMPLING, cap=2.0) == pytest.approx({"kl": kl, "ratio_max": 3.0, "above_cap": 1 / 3})
    assert mismatch_figures(SAMPLING, OLD, cap=2.0)["ratio_max"] == pytest.approx(3.0)  # either way
    assert mismatch_figures(OLD, SAMPLING, cap=4.0)["above_cap"] == 0
    assert mismatch_figures(OLD, OLD, cap=1.0) == {"kl": 0.0, "ratio_max": 1.0, "above_cap": 0.0}
    assert mismatch_figures([], [], cap=2.0) == {}


def test_kl_is_that_of_the_two_distributions() -> None:
    """Over every token of a vocabulary, as often as the sampler draws it, the mean of k3 is KL(sampler || policy)."""
    sampler, policy = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]
    drawn = [token for token, p in enumerate(sampler) for _ in range(round(10 * p))]
    found = mismatch_figures([math.log(policy[t]) for t in drawn], [math.log(sampler[t]) for t in drawn], cap=2.0)
    assert found["kl"] == pytest.approx(sum(q * math.log(q / p) for q, p in zip(sampler, policy, strict=True)))


@pytest.mark.parametrize("kl", [0.101, 7.0, math.inf, math.nan])
def test_a_mismatch_above_the_limit_is_refused_in_full(kl: float) -> None:
    with pytest.raises(Mismatch, match=r"round 4: .*loss\.max_mismatch: 0\.1\), largest ratio 12\.5\. .*temperature"):
        refuse_mismatch({"kl": kl, "ratio_max": 12.5}, 0.1, round_index=4)
    refuse_mismatch({"kl": kl, "ratio_max": 12.5}, None, round_index=4)


def test_what_is_within_the_limit_or_not_known_passes() -> None:
    refuse_mismatch({"kl": 0.1, "ratio_max": 99.0}, 0.1, round_index=0)
    refuse_mismatch({}, 0.1, round_index=0)

"""Ridgelines: densities that integrate to 1, on one scale, with what lies outside told."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mempo import ridges


def test_a_density_integrates_to_one_and_is_the_mean_of_its_kernels():
    grid = np.linspace(-4, 4, 4001)
    found = ridges.density(np.array([0.0, 1.0, 1.0]), grid, 0.25)
    assert np.trapezoid(found, grid) == pytest.approx(1.0, abs=1e-6)
    # 1/3 and 2/3 of 1 / (0.25 sqrt(2 pi)) = 1.5958; the other kernel, 4 bandwidths off, adds exp(-8) of its share
    assert found[2000] == pytest.approx(1.5958 * (1 / 3 + 2 / 3 * np.exp(-8)), rel=1e-3)
    assert found[2500] == pytest.approx(1.5958 * (2 / 3 + 1 / 3 * np.exp(-8)), rel=1e-3)


def test_rounds_are_spread_from_the_first_to_the_last():
    assert ridges.spread(list(range(24)), 8) == [0, 3, 7, 10, 13, 16, 20, 23]
    assert ridges.spread([3, 5], 8) == [3, 5] and ridges.spread([4], 8) == [4] and ridges.spread([], 8) == []


def test_the_range_holds_zero_and_has_a_width():
    assert ridges.shared_range(np.array([0.2, 0.6])) == (0.0, 0.6)
    assert ridges.shared_range(np.array([0.0, 0.0])) == (-1.0, 1.0)
    assert ridges.shared_range(np.array([-1.0] + [0.5] * 999 + [9e6])) == (0.0, 0.5)


def table(**columns: list[float | None]) -> pd.DataFrame:
    return pd.DataFrame({"round": [0, 0, 0, 5, 5], "turn": [2, 3, 2, 3, 2], **columns})


def test_one_scale_for_all_ridges_and_the_zero_line_is_drawn():
    (axes,) = ridges.over_rounds(table(mem_reward=[0.0, 0.0, None, -1.0, 1.0])).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["round 0  n = 2", "round 5  n = 2"]
    first, second = (line.get_ydata() for line in axes.lines if len(line.get_xdata()) == 400)
    # Round 0 has both values in one place, round 5 in two: half as high on the common scale.
    assert first.max() == pytest.approx(ridges.OVERLAP, rel=1e-3)
    assert second.max() + 1 == pytest.approx(ridges.OVERLAP / 2, rel=1e-2)
    assert any(list(line.get_xdata()) == [0, 0] for line in axes.lines)


def test_what_lies_outside_is_told():
    rewards = pd.DataFrame({"round": 0, "turn": 2, "mem_reward": [0.1] * 998 + [50.0, -50.0]})
    (axes,) = ridges.by_turn(rewards).axes
    assert axes.get_xlabel() == "mem_reward (0.2 % of the values lie outside)"


@pytest.mark.parametrize("draw", [ridges.over_rounds, ridges.by_turn])
def test_no_memory_reward_is_said(draw):
    (axes,) = draw(table(mem_reward=[None] * 5)).axes
    assert [text.get_text() for text in axes.texts] == ["no memory reward"]

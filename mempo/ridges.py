"""Ridgelines of the memory reward: one density a round, or a turn, above each other on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from mempo.style import INK, blank, say, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

WIDTH = 4.5
ROUNDS = 8
BANDWIDTHS = 50  # a kernel's standard deviation is the shared range over this
OVERLAP = 1.7  # height of the highest ridge, in distances between two
_TAIL = 0.005  # outside the range shown, on either side; the axis says how much
_FILL, _EDGE = "#bcd7e8", "#0072b2"


@styled
def over_rounds(rewards: pd.DataFrame) -> Figure:
    """Density of mem_reward in up to ``ROUNDS`` rounds spread evenly from the first to the last, the first on top."""
    rows = rewards.dropna(subset=["mem_reward"])
    found = np.sort(rows["round"].unique()).tolist()
    shown = spread(found, ROUNDS)
    return _ridgeline({f"round {index}": _values(rows, "round", index) for index in shown})


@styled
def by_turn(rewards: pd.DataFrame) -> Figure:
    """Density of mem_reward at every turn over all rounds given, the first turn on top."""
    rows = rewards.dropna(subset=["mem_reward"])
    turns = np.sort(rows["turn"].unique()).tolist()
    return _ridgeline({f"turn {turn}": _values(rows, "turn", turn) for turn in turns})


def spread(found: Sequence[int], count: int) -> list[int]:
    """Up to ``count`` of ``found``, evenly by position, first and last among them.

    >>> spread([0, 1, 2, 3, 4], 3)
    [0, 2, 4]
    """
    places = np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int)
    return [found[place] for place in places]


def density(values: Floats, grid: Floats, bandwidth: float) -> Floats:
    """Gaussian kernel density at ``grid``: mean over values of N(grid; value, bandwidth^2). Integrates to 1."""
    distance = (grid[:, None] - values[None, :]) / bandwidth
    heights: Floats = np.exp(-0.5 * distance**2).mean(axis=1) / (bandwidth * np.sqrt(2 * np.pi))
    return heights


def shared_range(values: Floats) -> tuple[float, float]:
    """Where all but ``_TAIL`` of the values lie on either side, 0 always inside; a range of one point gets a width."""
    low, high = np.quantile(values, [_TAIL, 1 - _TAIL], method="nearest")
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    return (low, high) if high > low else (-1.0, 1.0)


def _values(rows: pd.DataFrame, column: str, value: int) -> Floats:
    return rows.loc[rows[column] == value, "mem_reward"].to_numpy(dtype=np.float64)


def _ridgeline(groups: Mapping[str, Floats]) -> Figure:
    figure = blank(WIDTH, 1.2 + 0.34 * max(len(groups), 4))
    axes = figure.subplots()
    axes.set_xlabel("mem_reward")
    if not groups:
        say(axes, "no memory reward")
        return figure
    everything = np.concatenate(list(groups.values()))
    low, high = shared_range(everything)
    bandwidth = (high - low) / BANDWIDTHS
    grid = np.linspace(low - 3 * bandwidth, high + 3 * bandwidth, 400)
    heights = {name: density(values, grid, bandwidth) for name, values in groups.items()}
    highest = max(float(curve.max()) for curve in heights.values())
    for row, (name, curve) in enumerate(heights.items()):
        _ridge(axes, grid, curve * OVERLAP / highest, -row, float(np.median(groups[name])))
    axes.axvline(0, color=INK, lw=0.9, ls=(0, (3, 2)), zorder=100)
    axes.set_yticks([-row for row in range(len(groups))], [f"{n}  n = {len(v)}" for n, v in groups.items()])
    axes.set(xlim=(grid[0], grid[-1]), ylim=(0.55 - len(groups), OVERLAP + 0.15))
    axes.spines["left"].set_visible(False)
    if outside := float(((everything < low) | (everything > high)).mean()):
        axes.set_xlabel(f"mem_reward ({100 * outside:.1f} % of the values lie outside)")
    return figure


def _ridge(axes: Axes, grid: Floats, curve: Floats, base: float, median: float) -> None:
    axes.fill_between(grid, base, base + curve, color=_FILL, alpha=0.85, lw=0, zorder=2 - 2 * base)
    axes.plot(grid, base + curve, color=_EDGE, lw=1.0, zorder=3 - 2 * base)
    if grid[0] <= median <= grid[-1]:
        top = base + float(np.interp(median, grid, curve))
        axes.plot([median, median], [base, top], color="#00344f", lw=1.6, zorder=3 - 2 * base)

"""One quiet look for all figures: colours that the colour-blind can tell apart, and the few pieces figures share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

INK = "#333333"
# Okabe and Ito's palette; greys where nothing was learned by trial.
_KNOWN = {"pretrained": "#b5b5b5", "warmstart": "#7a7a7a",
          "mempo": "#0072b2", "grpo": "#d55e00", "full_context": "#009e73"}  # fmt: skip
_OTHERS = ("#cc79a7", "#56b4e9", "#e69f00", "#8c6d1f", "#5b4b8a")
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "legend.fontsize": 8.5,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": "#999999",
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "axes.titlelocation": "left",
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#ececec", "grid.linewidth": 0.7, "axes.axisbelow": True,
    "xtick.major.size": 3, "ytick.major.size": 0, "lines.linewidth": 1.7, "lines.solid_capstyle": "round",
    "legend.frameon": False, "figure.facecolor": "white", "savefig.facecolor": "white",
    "figure.constrained_layout.h_pad": 0.08, "figure.constrained_layout.w_pad": 0.08,
}  # fmt: skip


def ordered(names: Iterable[str]) -> list[str]:
    """The demo's policies first, in the order of the argument they make; others follow as they came."""
    found = list(dict.fromkeys(names))
    return [name for name in _KNOWN if name in found] + [name for name in found if name not in _KNOWN]


def colours(names: Iterable[str]) -> dict[str, str]:
    """One colour a policy, the same in every figure."""
    others = [name for name in ordered(names) if name not in _KNOWN]
    return _KNOWN | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def styled(function: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw under ``STYLE``; outside the call matplotlib's settings are as they were. matplotlib is imported here."""

    @wraps(function)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return function(*args, **kwargs)

    return drawn


def blank(width: float, height: float) -> Figure:
    """A figure of ``width`` x ``height`` inches that no pyplot knows of, so nothing has to be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def line(axes: Axes, x: pd.Series[float], y: pd.Series[float], **look: Any) -> None:
    """A line; a dot as well where there is one point and so no line to see."""
    axes.plot(x, y, marker="o" if y.notna().sum() == 1 else None, ms=4, **look)


def whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers: rounds and turns have no halves."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def legend(figure: Figure, axes: Axes, names: Sequence[str] = ()) -> None:
    """One legend above the figure: the entries of ``names`` in their order, then what else ``axes`` shows."""
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = [*names, *(label for label in entries if label not in names)]
    figure.legend([entries[label] for label in labels], labels, loc="outside upper left", ncols=8, columnspacing=1.4,
                  handletextpad=0.5, borderpad=0.2)  # fmt: skip


def boxes(axes: Axes, groups: Mapping[int, pd.Series[float]]) -> None:
    """A box at each key: median, quartiles, whiskers from the 5th to the 95th percentile."""
    positions = list(groups)
    step = int(min(np.diff(positions))) if len(positions) > 1 else 1
    axes.axhline(0, color="#999999", lw=0.8, zorder=0)
    axes.boxplot(
        [values.to_numpy(dtype=float) for values in groups.values()], positions=positions, widths=0.62 * step,
        whis=(5, 95), showfliers=False, showcaps=False, patch_artist=True, manage_ticks=False,
        whiskerprops={"color": INK, "lw": 0.8}, medianprops={"color": "#00344f", "lw": 1.8},
        boxprops={"facecolor": "#bcd7e8", "edgecolor": "#0072b2", "lw": 0.8},
    )  # fmt: skip
    axes.set_xlim(positions[0] - 0.8 * step, positions[-1] + 0.8 * step)
    whole_numbers(axes)


def stacked(axes: Axes, x: pd.Series[float], parts: Mapping[str, pd.Series[float]], colour: Mapping[str, str]) -> None:
    """Bars of one width, the parts on top of each other in their order."""
    bottom = np.zeros(len(x))
    width = 0.82 if len(x) <= 40 else 1.0  # gaps narrower than a pixel make patterns
    for name, heights in parts.items():
        axes.bar(x, heights, width, bottom, color=colour[name], label=name)
        bottom += heights.to_numpy(dtype=float)
    axes.grid(False)
    whole_numbers(axes)


def say(axes: Axes, text: str) -> None:
    """A panel that has nothing to show says so."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#777777")
    axes.set(xticks=[], yticks=[])

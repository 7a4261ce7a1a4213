"""A suite for people: tables in the terminal, and the same with its curves as one self-contained page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from rich.table import Table

from mempo.figures import STATUSES
from mempo.report import cells, columns, embedded, pages
from mempo.style import blank, colours, legend, styled
from mempo.suite_results import ALL, Comparison, Results, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "em": "exact match of all objectives", "em_mean": "exact match an objective",
    "total_tokens": "tokens read and written", "peak_tokens": "tokens of the longest turn",
}  # fmt: skip
_NAMES = {"em": "EM", "em_mean": "mean EM", "f1": "F1"}
_FROM_ZERO = {"em": 1.03, "em_mean": 1.03, "total_tokens": None, "peak_tokens": None}


def render(results: Results) -> list[Table]:
    """For a terminal: each dataset's agents, then each other agent against the first."""
    return [shown for dataset in results.datasets for shown in _tables(results, dataset)]


def _tables(results: Results, dataset: str) -> list[Table]:
    found = [_figures(dataset, _of(results, dataset))]
    compared = [one for one in results.comparisons if one.dataset == dataset]
    return [*found, _comparisons(dataset, compared)] if compared else found


def _of(results: Results, dataset: str) -> pd.DataFrame:
    return results.figures[results.figures["dataset"] == dataset]


def _figures(dataset: str, figures: pd.DataFrame) -> Table:
    whole = figures[figures["objectives"] == ALL]
    shown = columns(f"{dataset}: {whole['questions'].max()} questions", ("agent", "attempts"),
                    ("EM (± 95 %)", "mean EM", "F1", "format", "turns", "tokens", "peak", "s"))  # fmt: skip
    for _, row in whole.iterrows():
        rates = [f"{row[name]:.3f}" for name in ("em_mean", "f1", "format")]
        sizes = [f"{row['turns']:.1f}", f"{row['total_tokens']:.0f}", f"{row['peak_tokens']:.0f}"]
        em = f"{row['em']:.3f}±{(row['em_high'] - row['em_low']) / 2:.3f}"
        shown.add_row(row["agent"], row["attempts"], em, *rates, *sizes, f"{row['seconds']:.2f}")
    return shown


def _comparisons(dataset: str, compared: list[Comparison]) -> Table:
    shown = columns(f"{dataset}: difference to {compared[0].second}, and tokens as a share of its own",
                    ("agent", "attempts", "measure"), ("difference (95 %)", "p", "tokens"))  # fmt: skip
    for one in compared:
        told = one.difference
        interval = f"{told.value:+.3f} ({told.low:+.3f} {told.high:+.3f})"
        p = "" if pd.isna(told.p_value) else f"{told.p_value:.4f}"
        shown.add_row(one.first, one.attempts, _NAMES[one.measure], interval, p, f"{one.token_ratio:.2f}")
    return shown


@styled
def curves(figures: pd.DataFrame, agents: list[str]) -> Figure:
    """Of one dataset, by number of objectives: EM of all and of one, total tokens, longest turn; sampled, or greedy."""
    figure = blank(8.6, 5.4)
    panels, colour = figure.subplots(2, 2, sharex=True).flat, colours(agents)
    shown = figures[(figures["attempts"] == figures["attempts"].iloc[0]) & (figures["objectives"] != ALL)]
    for axes, (measure, label) in zip(panels, CURVES.items(), strict=True):
        for agent in agents:
            _curve(axes, shown[shown["agent"] == agent], measure, colour[agent], agent)
        axes.set(ylabel=label)
        axes.set_ylim(0, _FROM_ZERO[measure])
        axes.set_xticks(numbers(shown))
    for axes in panels[2:]:
        axes.set_xlabel("objectives of the question")
    legend(figure, panels[0], agents)
    return figure


def _curve(axes: Axes, rows: pd.DataFrame, measure: str, colour: str, label: str) -> None:
    x = rows["objectives"].astype(int)
    axes.plot(x, rows[measure], color=colour, marker="o", ms=4, lw=1.6, label=label)
    if measure == "em":
        axes.fill_between(x, rows["em_low"], rows["em_high"], color=colour, alpha=0.15, lw=0)


def page(results: Results) -> str:
    """The suite as one self-contained page."""
    images, datasets = {}, {}
    for dataset in results.datasets:
        figures = _of(results, dataset)
        whole = figures["objectives"] == ALL
        if len(numbers(figures)) > 1:
            images[f"curves_{dataset}"] = embedded(curves(figures, results.agents))
        datasets[dataset] = {
            "tables": [cells(shown) for shown in _tables(results, dataset)],
            "by_number": figures[~whole].to_dict("records"),
            "statuses": figures[whole].to_dict("records"),
            "majority": results.majority[dataset],
        }
    template = pages().get_template("suite.html")
    return template.render(name=results.name, datasets=datasets, images=images, statuses=list(STATUSES))

"""A suite for people: tables in the terminal, and the same with its curves as one self-contained page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from rich.table import Table

from mempo.figures import STATUSES
from mempo.report import cells, columns, embedded, pages
from mempo.style import blank, colours, legend, styled
from mempo.suite_results import ALL, Comparison, Results, comparisons, numbers, table

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
    figures, told = table(results), comparisons(results)
    found = []
    for dataset in figures["dataset"].unique():
        found.append(_figures(str(dataset), figures[figures["dataset"] == dataset]))
        if compared := [one for one in told if one.dataset == dataset]:
            found.append(_comparisons(str(dataset), compared))
    return found


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
    shown = figures[figures["attempts"] == figures["attempts"].iloc[0]]
    for axes, (measure, label) in zip(panels, CURVES.items(), strict=True):
        for agent in agents:
            _curve(axes, shown[(shown["agent"] == agent) & (shown["objectives"] != ALL)], measure, colour[agent], agent)
        axes.set(ylabel=label)
        axes.set_ylim(0, _FROM_ZERO[measure])
        axes.set_xticks(sorted({int(number) for number in shown.loc[shown["objectives"] != ALL, "objectives"]}))
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
    figures = table(results)
    images, datasets = {}, {}
    for dataset in figures["dataset"].unique():
        of_dataset = figures[figures["dataset"] == dataset]
        if len(numbers(figures, dataset)) > 1:
            images[f"curves_{dataset}"] = embedded(curves(of_dataset, results.agents))
        compared = [one for one in comparisons(results) if one.dataset == dataset]
        tables = [_figures(dataset, of_dataset)] + ([_comparisons(dataset, compared)] if compared else [])
        datasets[dataset] = {
            "tables": [cells(shown) for shown in tables],
            "by_number": of_dataset[of_dataset["objectives"] != ALL].to_dict("records"),
            "statuses": of_dataset[of_dataset["objectives"] == ALL].to_dict("records"),
            "majority": results.majority[dataset],
        }
    template = pages().get_template("suite.html")
    return template.render(name=results.name, datasets=datasets, images=images, statuses=list(STATUSES))

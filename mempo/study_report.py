"""An ablation for people: tables in the terminal, and the same with figures as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.table import Table

from mempo import study
from mempo.report import cells, columns, embedded, pages
from mempo.ridges import over_rounds
from mempo.style import INK, blank, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINES = {"grpo": "#d55e00", "published": "#5b4b8a"}
GREY = "#b8b8b8"
BEST = ("#0072b2", "#009e73")
COSTS = {"round": "round", "rollouts": "rollouts", "cpu_seconds": "CPU-seconds of training"}


def render(found: study.Study) -> dict[str, list[Table]]:
    """By mix, for a terminal: what each variant reached and at what cost; then how it compares with each baseline."""
    return {mix: _render(mix, table, found.targets[mix], found.baselines) for mix, table in found.tables.items()}


def _render(mix: str, table: pd.DataFrame, target: float, baselines: Sequence[str]) -> list[Table]:
    ranked = table.sort_values(["rollouts", "em"], ascending=[True, False])
    shown = columns(f"mix {mix}: medians to sampled EM {target:g}, then the end", ["variant"],
                    ("reached", "rollouts", "CPU-s", "EM (95 %)", "greedy", "quality"))  # fmt: skip
    for variant, row in ranked.iterrows():
        reached = f"{row['reached']:.0f}/{row['seeds']:.0f}"
        em = f"{row['em']:.3f} ({row['em_low']:.3f} {row['em_high']:.3f})"
        costs = [_number(row["rollouts"]), _number(row["cpu_seconds"])]
        shown.add_row(str(variant), reached, *costs, em, f"{row['em_greedy']:.3f}", f"{row['quality']:.3f}")
    found = [shown]
    for baseline in (name for name in baselines if name in table.index):
        against = columns(f"mix {mix}: against {baseline} (95 %; p: Holm)", ["variant"], ("EM", "rollouts"))
        for variant, row in ranked.drop(baseline).iterrows():
            differs, costs_less = (_estimate(row, f"{name}_to_{baseline}", form) for name, form in _FORMS.items())
            against.add_row(str(variant), differs, costs_less)
        found.append(against)
    return found


_FORMS = {"em": "+.3f", "rollouts": ".2f"}


def _number(value: float) -> str:
    return f"{value:.0f}" if np.isfinite(value) else "never"


def _estimate(row: pd.Series[Any], name: str, form: str) -> str:
    value = row.get(f"{name}_value", np.nan)
    if pd.isna(value):
        return "neither gets there" if name.startswith("rollouts") else ""
    low, high, p = row[f"{name}_low"], row[f"{name}_high"], row[f"{name}_p_value"]
    told = "" if pd.isna(p) else f" p {p:.3f}"
    return f"{value:{form}} ({low:{form}} {high:{form}}){told}".replace("inf", "∞")


def palette(variants: Sequence[str], best: Sequence[str]) -> dict[str, str]:
    """Baselines and the best variants in colour, the rest in grey: sixteen colours tell nobody anything."""
    picked = [name for name in best if name not in BASELINES]
    colours = BASELINES | dict(zip(picked, BEST, strict=False))
    return {name: colours.get(name, GREY) for name in variants}


@styled
def final_em(table: pd.DataFrame, colours: Mapping[str, str]) -> Figure:
    """EM by variant, best on top: sampled with its 95 % interval over seeds and questions, and greedy."""
    ranked = table.sort_values("em")
    figure = blank(8.6, 0.9 + 0.26 * len(ranked))
    axes = figure.subplots()
    for place, (variant, row) in enumerate(ranked.iterrows()):
        colour = colours[str(variant)]
        axes.plot([row["em_low"], row["em_high"]], [place, place], color=colour, lw=2.2)
        axes.plot(row["em"], place, "o", color=colour, ms=5, label="sampled, 95 %" if place == 0 else None)
        axes.plot(row["em_greedy"], place, "D", mfc="none", mec=INK, ms=4, label="greedy" if place == 0 else None)
    axes.set_yticks(range(len(ranked)), [str(name) for name in ranked.index])
    axes.set_xlabel("exact match")
    axes.grid(axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


@styled
def learning_curves(curves: pd.DataFrame, colours: Mapping[str, str], target: float) -> Figure:
    """Sampled EM (running mean of 3 rounds) over rounds, rollouts, CPU-seconds; band: smallest to largest seed."""
    figure = blank(8.6, 3.2)
    panels = figure.subplots(1, len(COSTS), sharey=True)
    # Grey ones first, so that they lie below.
    for variant in sorted(colours, key=lambda name: colours[name] != GREY):
        of_variant = curves[curves["variant"] == variant]
        for axes, cost in zip(panels, COSTS, strict=True):
            _band(axes, of_variant, cost, colours[variant], str(variant))
    for axes, label in zip(panels, COSTS.values(), strict=True):
        axes.axhline(target, color=INK, lw=0.8, ls=(0, (3, 2)))
        axes.set_xlabel(label)
    panels[0].set_ylabel("sampled EM")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def _band(axes: Axes, curves: pd.DataFrame, cost: str, colour: str, label: str) -> None:
    by_round = curves.groupby("round").agg(
        x=(cost if cost != "round" else "rollouts", "mean"),
        mean=("smoothed_em", "mean"), low=("smoothed_em", "min"), high=("smoothed_em", "max"),
    )  # fmt: skip
    x = by_round.index if cost == "round" else by_round["x"]
    quiet = colour == GREY
    axes.plot(x, by_round["mean"], color=colour, lw=0.8 if quiet else 1.8, label=None if quiet else label)
    if not quiet:
        axes.fill_between(x, by_round["low"], by_round["high"], color=colour, alpha=0.12, lw=0)


def page(found: study.Study) -> str:
    """A study as one self-contained page."""
    images: dict[str, str] = {}
    ridges: dict[str, dict[str, str]] = {}
    for mix, table in found.tables.items():
        best = study.mean_ranks(found.spent[found.spent["mix"] == mix]).index
        colours = palette(list(table.index), list(best))
        of_mix = found.curves[found.curves["mix"] == mix]
        images[f"curves_{mix}"] = embedded(learning_curves(of_mix, colours, found.targets[mix]))
        images[f"final_{mix}"] = embedded(final_em(table, colours))
        ridges[mix] = {}
        for variant in (name for name, colour in colours.items() if colour != GREY):
            rewards = _rewards(found.cells[(found.cells["mix"] == mix) & (found.cells["variant"] == variant)])
            if rewards["mem_reward"].notna().any():
                images[f"ridges_{mix}_{variant}"] = embedded(over_rounds(rewards))
                ridges[mix][f"ridges_{mix}_{variant}"] = variant
    mixes = {mix: [cells(table) for table in shown] for mix, shown in render(found).items()}
    template = pages().get_template("ablation.html")
    return template.render(count=len(found.cells), mixes=mixes, images=images, ridges=ridges)


def _rewards(cells: pd.DataFrame) -> pd.DataFrame:
    columns = ["round", "turn", "mem_reward"]
    return pd.concat([pd.read_parquet(Path(folder) / "rewards.parquet", columns=columns) for folder in cells["folder"]])

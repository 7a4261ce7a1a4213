"""Figures of a run: tables in, one matplotlib ``Figure`` out. No file is read or written, pyplot is not used.

``policies`` maps names to tables of one row a round with the columns of ``results/<name>/rounds.parquet``; ``rewards``
are rows of ``TurnReward`` with their ``round``. Memory reward: arXiv 2603.00680.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mempo.style import INK, blank, boxes, colours, legend, line, ordered, say, stacked, styled, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tables = Mapping[str, pd.DataFrame]

STATUSES = {
    "answered": "#c6dbe8", "no_action": "#e69f00", "max_turns": "#56b4e9",
    "truncated": "#cc79a7", "context_overflow": "#009e73", "tool_failed": "#d55e00",
}  # fmt: skip
PHASES = {"rollout": "#0072b2", "score": "#56b4e9", "advantage": "#e69f00", "diagnose": "#cc79a7",
          "update": "#d55e00", "check": "#7a7a7a"}  # fmt: skip
HEALTH = {
    "approx_kl": "KL to the sampling policy (nats)", "clip_fraction": "clipped tokens (share)",
    "grad_norm": "gradient norm", "entropy": "entropy (nats a token)",
    "ratio_max": "largest trainer / sampler ratio", "format_rate": "well-formed trajectories (share)",
    "kept/nothing_mem": "memories with nothing kept (share)", "group/flat_share": "flat groups (share)",
}  # fmt: skip
WIDTH = 8.6
SQUARE = (4.5, 3.8)
MAX_BOXES = 30
SMOOTH = 5
_UNIT = (-0.03, 1.03)
_DASHED = (0, (3, 2))


def standard_error(values: pd.Series[float]) -> float:
    """Standard error of a mean, s / sqrt(n) with the population s: sqrt(p (1 - p) / n) for values of 0 and 1."""
    return float(values.std(ddof=0) / np.sqrt(len(values)))


def training_cpu_seconds(table: pd.DataFrame) -> pd.Series[float]:
    """CPU-seconds up to the end of each round; dev checks and controls are no training and stay out."""
    looks = ("cpu/check_s", "cpu/diagnose_s")
    used = [name for name in table.columns if name.startswith("cpu/") and name not in looks]
    return table[used].sum(axis="columns").cumsum()


@styled
def exact_match(rows: pd.DataFrame, majority: Mapping[str, float]) -> Figure:
    """EM by number of objectives, all questions first: sampled with +- standard error, and greedy.

    ``rows``: EvaluationRow. ``majority``: the majority guesser's EM by group, ``all`` or the number as text.
    """
    figure = blank(WIDTH, 3.1)
    axes, names, colour = figure.subplots(), ordered(rows["policy"]), colours(rows["policy"])
    groups = {"all": rows} | {str(count): group for count, group in rows.groupby("num_objectives")}
    for x, (label, group) in enumerate(groups.items()):
        axes.hlines(majority[label], x - 0.44, x + 0.44, color="black", lw=1, ls=_DASHED)
        for i, name in enumerate(names):
            at = x + (i - (len(names) - 1) / 2) * 0.8 / max(len(names), 2)
            mine = group[group["policy"] == name]
            sampled, greedy = mine.loc[~mine["greedy"], "em"], mine.loc[mine["greedy"], "em"]
            axes.errorbar(at, sampled.mean(), standard_error(sampled), fmt="o", ms=6, lw=1.2, color=colour[name],
                          label=name if x == 0 else None)  # fmt: skip
            axes.plot(at, greedy.mean(), "D", ms=6, mfc="white", mec=colour[name], mew=1.3)
    axes.plot([], [], "D", mfc="white", mec=INK, label="greedy")
    axes.plot([], [], color="black", lw=1, ls=_DASHED, label="majority guesser")
    sizes = {label: group["question_id"].nunique() for label, group in groups.items()}
    axes.set_xticks(range(len(sizes)), [f"{label}\nn = {size}" for label, size in sizes.items()])
    axes.set(ylabel="exact match", xlabel="objectives of the question", ylim=_UNIT)
    legend(figure, axes, names)
    return figure


@styled
def learning(policies: Tables) -> Figure:
    """Sampled EM of the training rollouts by round and by CPU-seconds; greedy EM on dev questions where checked."""
    figure = blank(WIDTH, 3.1)
    by_round, by_cpu = figure.subplots(1, 2, sharey=True)
    colour = colours(policies)
    for name in ordered(policies):
        table = policies[name]
        smooth = table["em"].rolling(SMOOTH, center=True, min_periods=1).mean()
        for axes, x in ((by_round, table["round"]), (by_cpu, training_cpu_seconds(table))):
            axes.plot(x, table["em"], color=colour[name], lw=0.8, alpha=0.35)
            line(axes, x, smooth, color=colour[name], label=name)
            if "dev/em_greedy" in table:
                axes.plot(x, table["dev/em_greedy"], "D", ms=5, mfc="white", mec=colour[name], mew=1.3)
    if any("dev/em_greedy" in table for table in policies.values()):
        by_round.plot([], [], "D", mfc="white", mec=INK, label="dev, greedy")
    by_round.set(xlabel="round", ylabel="exact match", ylim=_UNIT)
    by_cpu.set_xlabel("CPU-seconds of training")
    whole_numbers(by_round)
    legend(figure, by_round)
    return figure


@styled
def mem_reward_box(rewards: pd.DataFrame) -> Figure:
    """mem_reward by round: median, quartiles, whiskers from the 5th to the 95th percentile. ``round``, ``mem_reward``.

    Of more than ``MAX_BOXES`` rounds every second, third, .. is shown, counted from the last.
    """
    figure = blank(*SQUARE)
    axes = figure.subplots()
    axes.set(xlabel="round", ylabel="mem_reward")
    rows = rewards.dropna(subset=["mem_reward"])
    if rows.empty:
        say(axes, "no memory reward")
        return figure
    found = np.sort(rows["round"].unique())
    shown = found[:: -ceil(len(found) / MAX_BOXES)][::-1].tolist()
    boxes(axes, {index: rows.loc[rows["round"] == index, "mem_reward"] for index in shown})
    return figure


@styled
def mem_reward_by_turn(rewards: pd.DataFrame) -> Figure:
    """mem_reward by turn over all rounds given, drawn as by ``mem_reward_box``. ``turn``, ``mem_reward``."""
    figure = blank(*SQUARE)
    axes = figure.subplots()
    rows = rewards.dropna(subset=["mem_reward"])
    if rows.empty:
        say(axes, "no memory reward")
    else:
        turns = np.sort(rows["turn"].unique()).tolist()
        groups = {turn: rows.loc[rows["turn"] == turn, "mem_reward"] for turn in turns}
        boxes(axes, groups)
        axes.set_xticks(list(groups), [f"{turn}\nn = {len(values)}" for turn, values in groups.items()])
    axes.set(xlabel="turn", ylabel="mem_reward")
    return figure


@styled
def probes(rewards: pd.DataFrame) -> Figure:
    """p_mem and p_full by round: median, and the band between the quartiles. ``round``, ``p_mem``, ``p_full``."""
    figure = blank(WIDTH, 2.7)
    axes = figure.subplots()
    axes.set(xlabel="round", ylabel="probability of the answer", ylim=_UNIT)
    rows = rewards.dropna(subset=["p_mem", "p_full"])
    if rows.empty:
        say(axes, "no memory reward")
        return figure
    for name, colour in (("p_full", "#009e73"), ("p_mem", "#0072b2")):
        quartiles = rows.groupby("round")[name].quantile(np.array([0.25, 0.5, 0.75])).unstack()
        axes.fill_between(quartiles.index, quartiles[0.25], quartiles[0.75], color=colour, alpha=0.15, lw=0)
        axes.plot(quartiles.index, quartiles[0.5], color=colour, marker="o", ms=3, label=name)
    whole_numbers(axes)
    legend(figure, axes)
    return figure


@styled
def health(policies: Tables) -> Figure:
    """Small multiples by round of what goes wrong first when training goes wrong."""
    figure = blank(WIDTH, 5.6)
    panels, colour = figure.subplots(3, 3).ravel(), colours(policies)
    for axes, (column, title) in zip(panels, HEALTH.items(), strict=False):
        for name in ordered(policies):
            table = policies[name]
            if column in table:
                line(axes, table["round"], table[column], color=colour[name], lw=1.3)
        axes.set_title(title)
        axes.set_ylim(_UNIT if column.endswith(("_rate", "_share", "nothing_mem")) else (0, None))
        whole_numbers(axes)
    for name in ordered(policies):
        panels[-1].plot([], [], color=colour[name], label=name)
    panels[-1].set_axis_off()
    panels[-1].legend(loc="center left", title="by round", alignment="left")
    return figure


@styled
def statuses(policies: Tables) -> Figure:
    """How trajectories ended, as shares by round, one panel a policy."""
    return _panels(policies, "status/{}", STATUSES, "share of trajectories")


@styled
def cost(policies: Tables) -> Figure:
    """Wall-clock seconds of each step by round, one panel a policy."""
    return _panels(policies, "time/{}_s", PHASES, "seconds a round")


def _panels(policies: Tables, column: str, colour: Mapping[str, str], label: str) -> Figure:
    """Stacked bars by round. A part that is 0, or has no column or no value, did not occur there."""
    names, figure = ordered(policies), blank(WIDTH, 2.9)
    wanted = ["round", *(column.format(part) for part in colour)]
    tables = {name: policies[name].reindex(columns=wanted).fillna(0.0) for name in names}
    seen = [part for part in colour if any(table[column.format(part)].any() for table in tables.values())]
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        table = tables[name]
        stacked(axes, table["round"], {part: table[column.format(part)] for part in seen}, colour)
        axes.set(title=name, xlabel="round")
    panels[0].set_ylabel(label)
    legend(figure, panels[0])
    return figure

"""Figures: what they draw is checked on their axes; how they look was checked by eye."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

import pandas as pd
import pytest

from mempo import figures, style
from mempo.figures import Tables
from tests.unit.results_tree import MAJORITY, write_tree


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("figures"), num_rounds=4)


@pytest.fixture(scope="module")
def policies(root: Path) -> Tables:
    return {
        name: pd.read_parquet(root / "results" / name / "rounds.parquet") for name in ("full_context", "mempo", "grpo")
    }


@pytest.fixture(scope="module")
def rewards(root: Path) -> pd.DataFrame:
    return pd.read_parquet(root / "results" / "mempo" / "rewards.parquet")


def png(figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_a_box_a_round_with_the_stated_whiskers():
    table = pd.DataFrame({"round": [0] * 101 + [1] * 3, "mem_reward": [*range(101), 1.0, 2.0, None]})
    (axes,) = figures.mem_reward_box(table).axes
    medians = [line.get_ydata()[0] for line in axes.lines if line.get_linewidth() == 1.8]
    assert medians == [50.0, 1.5]  # the row without a reward is no value
    whiskers = sorted(y for line in axes.lines if line.get_linewidth() == 0.8 for y in line.get_ydata())
    assert whiskers[-1] == 95.0 and 5.0 in whiskers  # of 0..100: the 5th and the 95th percentile


def test_many_rounds_are_thinned_evenly_and_keep_the_last():
    rounds = range(100)
    table = pd.DataFrame({"round": rounds, "mem_reward": [float(i) for i in rounds]})
    (axes,) = figures.mem_reward_box(table).axes
    medians = [line.get_ydata()[0] for line in axes.lines if line.get_linewidth() == 1.8]
    assert medians == [float(i) for i in range(3, 100, 4)]  # 100 rounds, at most 30 boxes: every fourth


@pytest.mark.parametrize("draw", [figures.mem_reward_box, figures.mem_reward_by_turn, figures.probes])
@pytest.mark.parametrize("none", [None, float("nan")])
def test_no_memory_reward_is_said(draw, none):
    columns = {"round": [0, 0], "turn": [1, 2], "mem_reward": [none] * 2, "p_mem": [none] * 2, "p_full": [none] * 2}
    assert texts(draw(pd.DataFrame(columns))) == ["no memory reward"]


def test_turns_are_counted(rewards: pd.DataFrame):
    (axes,) = figures.mem_reward_by_turn(rewards).axes
    counts = rewards.dropna(subset=["mem_reward"])["turn"].value_counts()
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        f"{t}\nn = {counts[t]}" for t in sorted(counts.index)
    ]


def test_one_colour_a_policy_in_every_figure():
    known = style.colours(["other", "grpo", "mempo"])
    assert known["mempo"] == style.colours(["mempo"])["mempo"]
    assert len(set(style.colours(["a", "b", "mempo", "grpo", "full_context", "warmstart", "pretrained"]).values())) == 7
    assert style.ordered(["other", "grpo", "warmstart", "mempo"]) == ["warmstart", "mempo", "grpo", "other"]


def test_learning_has_cpu_seconds_without_dev_checks(policies: Tables):
    table = pd.DataFrame({"cpu/rollout_s": [2.0, 2.0], "cpu/update_s": [1.0, 1.0], "cpu/check_s": [None, 9.0]})
    assert figures.training_cpu_seconds(table).tolist() == [3.0, 6.0]
    by_round, by_cpu = figures.learning(policies).axes
    legend = by_round.figure.legends[0].get_texts()
    assert [text.get_text() for text in legend] == ["mempo", "grpo", "full_context"]
    assert by_cpu.get_xlabel() == "CPU-seconds of training"


def test_stacked_shares_fill_the_bar(policies: Tables):
    for axes in figures.statuses(policies).axes:
        tops = {}
        for bar in axes.patches:
            tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
        assert len(tops) == 4 and all(top == pytest.approx(1.0) for top in tops.values())


def test_what_never_occurred_is_not_in_the_legend():
    rounds = pd.DataFrame({"round": [0, 1], "status/answered": [1.0, 0.5], "status/no_action": [0.0, 0.5]})
    table = rounds.assign(**{"status/truncated": 0.0, "status/max_turns": float("nan")})
    (legend,) = figures.statuses({"mempo": table}).legends
    assert [text.get_text() for text in legend.get_texts()] == ["answered", "no_action"]


def test_standard_error():
    assert figures.standard_error(pd.Series([1.0, 0.0, 0.0, 1.0])) == 0.25  # sqrt(0.5 * 0.5 / 4)


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_every_figure_can_be_drawn_twice_alike_and_touches_no_global_style(num_rounds: int, tmp_path: Path):
    import matplotlib

    root = write_tree(tmp_path, ("mempo", "grpo", "third"), num_rounds)
    tables = {n: pd.read_parquet(root / "results" / n / "rounds.parquet") for n in ("mempo", "grpo", "third")}
    table = pd.read_parquet(root / "results" / "mempo" / "rewards.parquet")
    rows = pd.read_parquet(root / "results" / "evaluation.parquet")
    before = dict(matplotlib.rcParams)
    for draw in (figures.learning, figures.health, figures.statuses, figures.cost):
        assert png(draw(tables)) == png(draw(tables))
    for draw in (figures.mem_reward_box, figures.mem_reward_by_turn, figures.probes):
        assert png(draw(table)) == png(draw(table))
    assert png(figures.exact_match(rows, MAJORITY | {"all": 0.02}))
    assert dict(matplotlib.rcParams) == before


def test_rewards_of_any_size_are_drawn():
    values = [random.Random(0).gauss(0, 1e6) for _ in range(50)]
    assert png(figures.mem_reward_box(pd.DataFrame({"round": [7] * 50, "mem_reward": values})))

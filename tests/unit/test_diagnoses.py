"""What the diagnoses say of rounds so small that every figure can be worked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from mempo import diagnoses, samples, stats
from mempo.config import Config
from mempo.diagnoses import balance, bias, filters, truth, variance
from mempo.diagnoses.captions import CAPTIONS
from mempo.records import Trajectory, TurnScore
from mempo.rounds import RoundRecords
from tests.unit.builders import question, trajectory, turn, turn_score

LYON = [("Lyon", "France")]


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    values = {"question_id": "q", "sample_index": 0, "turn": 2, "round": 0, "mem_weight": 1.0, "score": 1.0,
              "outcome_advantage": 0.0, "mem_reward": 0.0, "mem_advantage": 0.0, "mem_tokens": 4, "quality": math.nan,
              "p_mem": 0.5, "p_full": 0.5}  # fmt: skip
    return pd.DataFrame([values | row for row in rows])


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


# --- bias ---


def test_the_share_of_the_turn_in_the_variance_of_the_advantage():
    rows = frame(*({"turn": t, "mem_advantage": a} for t, a in [(2, 1.0), (2, 0.0), (3, -1.0), (3, 0.0)]),
                 {"turn": 4, "mem_advantage": 9.0, "mem_reward": math.nan})  # fmt: skip
    # means 0.5 and -0.5 around 0: between turns 4 x 0.25 = 1 of a total of 1 + 0 + 1 + 0 = 2
    assert bias.figures(rows) == {
        "mem_advantage/turn_2": 0.5, "mem_advantage/turn_3": -0.5, "turn_share": pytest.approx(0.5)
    }  # fmt: skip
    table = bias.table(rows)
    assert table["turn"].tolist() == [2, 3] and table["n"].tolist() == [2, 2]


def test_equal_advantages_have_no_share():
    assert "turn_share" not in bias.figures(frame({"turn": 2}, {"turn": 3}))


# --- filters ---


def probes() -> list[TurnScore]:
    of = trajectory([turn(3, 2)] + [turn(5, 4, (1, 3)) for _ in range(3)])
    return [
        turn_score(of, 1),
        # independent .9 - .8 = +.1, the unsure token dropped; none and shared sqrt(.9 x .1) - .8 = -.5
        turn_score(of, 2, logs(0.8, 0.8), logs(0.9, 0.1)),
        # independent: nothing kept of the memory, p = 1, 1 - .8 = +.2; none and shared .2 - .8 = -.6
        turn_score(of, 3, logs(0.8), logs(0.2)),
        turn_score(of, 4, logs(0.9), logs(0.95)),  # +.05 under each
    ]


def test_the_filter_turns_signs_round():
    rows = filters.audit(probes(), Config())
    assert rows["turn"].tolist() == [2, 3, 4]
    assert rows["reward_independent"].tolist() == pytest.approx([0.1, 0.2, 0.05])
    assert rows["reward_none"].tolist() == rows["reward_shared"].tolist() == pytest.approx([-0.5, -0.6, 0.05])
    assert filters.figures(rows) == {
        "filter/flips_shared": pytest.approx(2 / 3),
        "filter/flips_none": pytest.approx(2 / 3),
        "filter/nothing_full": 0.0,
        "filter/nothing_mem": pytest.approx(1 / 3),
    }


def test_what_is_skipped_has_no_sign_and_other_kinds_are_audited_as_differences():
    config = Config.model_validate({"mem_reward": {"empty": "skip", "kind": "p_mem", "length_penalty": 9.0}})
    rows = filters.audit(probes(), config)
    assert rows["reward_independent"].tolist()[::2] == pytest.approx([0.1, 0.05])
    assert math.isnan(rows["reward_independent"][1])
    assert filters.figures(rows)["filter/flips_none"] == 0.5  # of two pairs one


def test_the_table_of_filters():
    rows = filters.audit(probes(), Config()).assign(quality=[0.0, 0.5, 1.0])
    table = filters.table(rows).set_index("mask")
    assert table["n"].tolist() == [3, 3, 3]
    assert table.loc["independent", "positive"] == 1.0
    assert table.loc["none", "positive"] == pytest.approx(1 / 3)
    assert table.loc["none", "nothing_mem"] == 0.0
    # rewards -.15, -.25, .4 from their mean, quality -.5, 0, .5: (.075 + .2) / sqrt(.245 x .5)
    assert table.loc["none", "correlation"] == pytest.approx(0.275 / 0.35)
    assert filters.table(filters.audit([], Config()).assign(quality=[])).empty


# --- truth ---


def test_the_advantage_against_true_quality():
    rows = frame(
        {"quality": 1.0, "mem_advantage": 1.0, "mem_reward": 0.1, "outcome_advantage": -1.0},
        {"quality": 0.5, "mem_advantage": -1.0, "mem_reward": 0.2, "outcome_advantage": 1.0},
        {"quality": math.nan, "mem_advantage": 5.0},
        {"quality": 0.0, "mem_advantage": 0.0, "mem_reward": math.nan, "outcome_advantage": 3.0},  # was not scored
    )
    assert truth.figures(rows) == {"truth/quality": 0.5, "truth/correlation": pytest.approx(1.0)}
    # outcome -1, 1, 3 on quality 1, .5, 0 falls on a line
    assert truth.table(rows).to_numpy().tolist() == [pytest.approx([0, 3, 0.5, -1.0, 1.0, -1.0, 1.0, -1.0])]


@pytest.mark.parametrize(
    ("first", "second"), [([], []), ([1.0], [1.0]), ([1.0, 1.0], [0.0, 1.0]), ([0.1] * 3, [1.0, 2.0, math.nan])]
)
def test_no_correlation_without_variation(first: list[float], second: list[float]):
    assert math.isnan(stats.correlation(first, second))


# --- balance ---


def segments() -> pd.DataFrame:
    return frame(
        {"score": 1.0, "outcome_advantage": 1.0, "mem_advantage": 0.5},
        {"score": 1.0, "outcome_advantage": 1.0, "mem_advantage": -2.0},
        {"score": 0.0, "outcome_advantage": -1.0, "mem_advantage": 2.0},
        {"score": 0.0, "outcome_advantage": -1.0, "mem_advantage": -0.5},
        {"score": 0.0, "outcome_advantage": 7.0, "mem_reward": math.nan},
    )


def test_quadrants_and_the_sign_of_the_sum_under_every_gate():
    table = balance.quadrants(segments()).set_index("quadrant")
    assert table["n"].tolist() == [1, 1, 1, 1]
    # 1 + .5, 1 - 2, -1 + 2, -1 - .5; a gate takes the memory's part from the wrong answers: -1, -1
    assert table["gate_none"].tolist() == [1.0, 0.0, 1.0, 0.0]
    for gate in ("outcome_nonnegative", "outcome_correct"):
        assert table[f"gate_{gate}"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert table["outcome"].tolist() == [1.0, 1.0, -1.0, -1.0]
    assert table["memory"].tolist() == [0.5, -2.0, 2.0, -0.5]


def test_the_scale_of_both_parts():
    found = balance.figures(segments(), "none")
    # outcome +-1: std 1. memory .5, -2, 2, -.5: mean 0, std sqrt((.25 + 4 + 4 + .25) / 4)
    assert found["balance/outcome_std"] == 1.0
    assert found["balance/memory_std"] == pytest.approx(math.sqrt(8.5 / 4))
    # covariance (.5 - 2 - 2 + .5) / 4 = -.75
    assert found["balance/correlation"] == pytest.approx(-0.75 / math.sqrt(8.5 / 4))
    assert found["quadrant/wrong_above"] == 0.25 and found["quadrant/wrong_above_positive"] == 1.0
    halved = balance.figures(segments().assign(mem_weight=0.5), "none")
    assert halved["balance/memory_std"] == pytest.approx(math.sqrt(8.5 / 16))
    assert halved["quadrant/wrong_above_positive"] == 0.0  # -1 + 0.5 x 2 = 0 pushes nothing up
    gated = balance.figures(segments(), "outcome_correct")  # .5, -2, 0, 0: mean -.375
    assert gated["balance/memory_std"] == pytest.approx(math.sqrt(4.25 / 4 - 0.375**2))
    assert balance.table(segments())["gate"].tolist() == list(balance.GATES)


# --- variance ---


def test_a_variance_is_split_by_question_trajectory_and_turn():
    rows = frame(
        {"question_id": "a", "sample_index": 0, "p_mem": 0.0, "p_full": 0.1},
        {"question_id": "a", "sample_index": 0, "p_mem": 0.4, "p_full": 0.1},
        {"question_id": "a", "sample_index": 1, "p_mem": 0.6, "p_full": 0.1},
        {"question_id": "b", "sample_index": 0, "p_mem": 1.0, "p_full": 0.5},
        {"question_id": "b", "p_mem": 0.3, "p_full": math.nan},
    )
    # mean 1/2; a: mean 1/3, trajectories .2 and .6; b: mean 1
    found = variance.parts(rows)
    assert found["p_mem"] == pytest.approx({
        "question": (3 * (1 / 2 - 1 / 3) ** 2 + (1 - 1 / 2) ** 2) / 4,  # 1/12
        "trajectory": (2 * (1 / 3 - 0.2) ** 2 + (0.6 - 1 / 3) ** 2) / 4,
        "turn": 2 * 0.2**2 / 4,
    })  # fmt: skip
    # p_full: mean .2; varies between questions alone, and with p_mem: (3 x (-1/6)(-.1) + .5 x .3) / 4 = .05
    assert found["p_full"] == pytest.approx({"question": 0.03, "trajectory": 0.0, "turn": 0.0})
    assert found["cov2"] == pytest.approx({"question": 0.1, "trajectory": 0.0, "turn": 0.0})
    # subtracting p_full removes of the question's part alone, which the pool's mean removes anyway
    assert variance.figures(rows)["variance/removed"] == pytest.approx(0.0)
    assert variance.table(rows)["of"].tolist() == ["p_mem", "p_full", "cov2", "difference"]


def test_a_baseline_that_moves_with_the_memory_removes_and_one_that_moves_alone_adds():
    rows = frame({"p_mem": 0.2, "p_full": 0.3}, {"p_mem": 0.6, "p_full": 0.7})
    assert variance.figures(rows)["variance/removed"] == pytest.approx(1.0)
    rows = frame({"p_mem": 0.2, "p_full": 0.7}, {"p_mem": 0.6, "p_full": 0.3})
    assert variance.figures(rows)["variance/removed"] == pytest.approx(1 - 0.16 / 0.04)  # gaps -.5, .3: variance .16


row_values = st.tuples(
    st.sampled_from("abc"), st.integers(0, 2), st.floats(0, 1, allow_subnormal=False), st.floats(0, 1)
)


@given(st.lists(row_values, min_size=1, max_size=20))
def test_the_parts_add_up(values: list[tuple[str, int, float, float]]):
    rows = frame(*({"question_id": q, "sample_index": s, "p_mem": m, "p_full": f} for q, s, m, f in values))
    found = variance.parts(rows)
    mem, full = rows["p_mem"], rows["p_full"]
    assert sum(found["p_mem"].values()) == pytest.approx(mem.var(ddof=0), abs=1e-9)
    assert sum(found["p_full"].values()) == pytest.approx(full.var(ddof=0), abs=1e-9)
    assert sum(found["cov2"].values()) == pytest.approx(
        2 * ((mem - mem.mean()) * (full - full.mean())).mean(), abs=1e-9
    )
    assert sum(found["difference"].values()) == pytest.approx((mem - full).var(ddof=0), abs=1e-9)
    assert all(found[name][part] >= 0 for name in ("p_mem", "p_full") for part in variance.PARTS)
    table = variance.table(rows)
    assert table["total"].tolist() == pytest.approx(table[variance.PARTS].sum(axis="columns").tolist())


# --- the whole round ---


def made(config: Config, *, version: int = 0, memory: bool = True) -> RoundRecords:
    """Two attempts at one question: one memory holds France (p .9), the other does not (.2); p_full is .8."""
    first = turn(3, 2, observation="Lyon: country France.")
    of = [
        trajectory([first, turn(5, 4, (1, 3), memory="country France")], policy_version=version),
        trajectory([first, turn(5, 4, (1, 3), memory="nothing")], sample=1, answer="Rome", policy_version=version),
        trajectory([first], sample=2, answer=None, status="tool_failed", policy_version=version),
    ]
    scores = [turn_score(t, 1) for t in of]
    for t, p in zip(of, (0.9, 0.2), strict=False):
        score = turn_score(t, 2, logs(0.8), logs(p)) if memory else turn_score(t, 2)
        scores.append(score if memory else replace(score, reason="not_asked"))
    questions = {"q": question()}
    _, table = samples.build(of, questions, scores, config, round_index=version)
    return RoundRecords(of, questions, scores, table)


CONFIG = Config.model_validate({"mem_reward": {"mask": "none"}})


def test_the_figures_of_a_round():
    found = diagnoses.figures(made(CONFIG), CONFIG, {"q": [LYON]})
    assert all(name.startswith("diagnose/") and math.isfinite(value) for name, value in found.items())
    assert len(found) <= 45
    assert found["diagnose/truth/correlation"] == pytest.approx(1.0)
    assert found["diagnose/truth/quality"] == 0.5
    assert found["diagnose/filter/flips_none"] == 0.5  # .2 is under the threshold: 1 - .8 instead of .2 - .8
    assert found["diagnose/balance/correlation"] == pytest.approx(1.0)
    assert found["diagnose/quadrant/right_above"] == found["diagnose/quadrant/wrong_below"] == 0.5
    assert "diagnose/quadrant/right_below_positive" not in found  # of no segment there is no share


def test_a_round_without_memory_reward_or_without_anything():
    unasked = diagnoses.figures(made(CONFIG, memory=False), CONFIG, {})
    assert unasked and all(name.startswith("diagnose/strategy/") for name in unasked)
    known = diagnoses.figures(made(CONFIG, memory=False), CONFIG, {"q": [LYON]})
    assert known["diagnose/truth/quality"] == 0.5 and "diagnose/truth/correlation" not in known
    nothing = RoundRecords([trajectory([], status="context_overflow", answer=None)], {"q": question()}, [], [])
    assert diagnoses.figures(nothing, CONFIG, {}) == {}
    assert diagnoses.tables([nothing, nothing], CONFIG, {}) == {}
    assert diagnoses.figures(RoundRecords([], {}, [], []), CONFIG, {}) == {}


def test_the_weight_is_that_of_the_round():
    config = Config.model_validate({"advantage": {"mem_weight": 0.8, "anneal_rounds": 4}})
    rounds = [made(config, version=version) for version in (1, 3)]
    rows = diagnoses.turn_rows(rounds, config, {})
    assert rows.groupby("round")["mem_weight"].unique().to_dict() == {1: [pytest.approx(0.6)], 3: [pytest.approx(0.2)]}


def test_tables_over_rounds_as_json():
    rounds = [made(CONFIG), made(CONFIG, version=1)]
    found = diagnoses.tables(rounds, CONFIG, {"q": [LYON]})
    assert list(found) == list(CAPTIONS)
    assert found["truth"]["round"].tolist() == [0, 1]
    assert found["bias"]["n"].tolist() == [4]
    # the same question twice is two pools: nothing varies between the rounds' trajectories of the same number
    assert found["variance"].set_index("of").loc["p_mem", "question"] == pytest.approx(0.0)
    stored = json.loads(json.dumps(diagnoses.summary(rounds, CONFIG, {"q": [LYON]}), allow_nan=False))
    assert stored["rounds"] == 2
    quadrants = stored["tables"]["quadrants"]
    assert quadrants["columns"] == list(found["quadrants"].columns)
    assert quadrants["rows"][1] == ["right_below", 0, None, None, None, None, None]
    assert [type(value) for value in quadrants["rows"][0][:3]] == [str, int, float]


def test_the_order_of_trajectories_changes_nothing():
    def shuffled(records: RoundRecords) -> RoundRecords:
        backwards: list[Trajectory] = records.trajectories[::-1]
        return RoundRecords(backwards, records.questions, records.scores[::-1], records.table[::-1])

    one = diagnoses.figures(made(CONFIG), CONFIG, {"q": [LYON]})
    assert diagnoses.figures(shuffled(made(CONFIG)), CONFIG, {"q": [LYON]}) == pytest.approx(one)

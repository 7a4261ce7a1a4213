"""Options of the memory signal, each against a value worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mempo import advantages
from mempo.config import Config, MemReward
from mempo.params import ConfigError, checked
from mempo.probe_rewards import memory_rewards
from mempo.records import ProbeScore, TurnScore
from mempo.samples import build
from tests.unit.builders import probe_score, question, trajectory, turn, turn_score

UNFILTERED: dict[str, Any] = {"threshold": 0.5, "mask": "none"}


def scored(*probes: ProbeScore) -> TurnScore:
    of = trajectory([turn(3, 2), turn(5, 4, (1, 3))])
    bare = turn_score(of, 2, [-0.1], [-0.1])
    return TurnScore(**{name: getattr(bare, name) for name in bare.__slots__} | {"probes": list(probes)})


def one(
    probes: list[ProbeScore], aliases: Any = "first", **options: Any
) -> tuple[float | None, float | None, float | None]:
    """p_full, p_mem and the reward of a single turn."""
    values, rewards = memory_rewards([[scored(*probes)]], MemReward(**UNFILTERED | options), aliases=aliases)
    (value,), (reward,) = values[0], rewards[0]
    assert value is not None
    return value.p_full, value.p_mem, reward


def ln(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_look_ahead_is_the_discounted_mean_over_the_observations_that_follow() -> None:
    probe = probe_score(ln(0.5), ln(0.1), ahead_logprobs=[ln(0.4), ln(0.8)])
    # weights .5 and .25: (.5 * .4 + .25 * .8) / .75 = .5333; the memory's own .1 is no part of it
    assert one([probe], discount=0.5)[1] == pytest.approx(0.4 / 0.75)
    assert one([probe])[1] == pytest.approx(0.6)  # (.4 + .8) / 2
    assert one([probe])[2] == pytest.approx(0.1)  # .6 - .5
    # Nothing follows the last memory: what it says by itself.
    assert one([probe_score(ln(0.5), ln(0.1))])[1] == pytest.approx(0.1)


def test_look_ahead_filters_each_step_by_itself() -> None:
    probe = probe_score(ln(0.9, 0.2), ln(0.9, 0.9), ahead_logprobs=[ln(0.8, 0.3)])
    # shared: the second token stays out, since neither .2 nor the look-ahead's .3 clears .5
    assert one([probe], mask="shared")[1] == pytest.approx(0.8)


def test_aliases_best_and_mean() -> None:
    probes = [probe_score(ln(0.2), ln(0.3)), probe_score(ln(0.6), ln(0.1))]
    assert one(probes) == pytest.approx((0.2, 0.3, 0.1))
    assert one(probes, "best") == pytest.approx((0.6, 0.3, -0.3))  # each side its own best wording
    assert one(probes, "mean") == pytest.approx((0.4, 0.2, -0.2))
    assert one(probes[:1], "best") == one(probes[:1], "mean") == pytest.approx((0.2, 0.3, 0.1))


P = st.floats(0.01, 1)


@given(st.lists(st.tuples(P, P), min_size=1, max_size=8), st.lists(P, max_size=4), st.floats(0.1, 1))
def test_means_lie_among_what_they_are_of(
    sides: list[tuple[float, float]], ahead: list[float], discount: float
) -> None:
    probes = [probe_score(ln(full), ln(mem)) for full, mem in sides]
    best, mean = one(probes, "best"), one(probes, "mean")
    for side in (0, 1):
        values = [pair[side] for pair in sides]
        assert best[side] == pytest.approx(max(values))
        assert min(values) - 1e-9 <= (mean[side] or 0.0) <= max(values) + 1e-9
    of = ahead or [sides[0][1]]
    p_mem = one([probe_score(*map(ln, sides[0]), ahead_logprobs=[ln(p) for p in ahead])], discount=discount)[1]
    assert min(of) - 1e-9 <= (p_mem or 0.0) <= max(of) + 1e-9


def test_aliases_of_which_one_keeps_nothing() -> None:
    probes = [probe_score(ln(0.2), ln(0.3)), probe_score(ln(0.9), ln(0.8))]
    skip: dict[str, Any] = {"mask": "shared", "empty": "skip"}
    assert one(probes, "mean", **skip) == pytest.approx((0.9, 0.8, -0.1))  # the first wording has no p
    assert one(probes[:1], "mean", **skip) == (None, None, None)


def test_ill_formed_turns_leave_the_pool() -> None:
    two = [trajectory([turn(3, 2), turn(5, 4, (1, 3), valid=valid)], sample=i) for i, valid in enumerate((True, False))]
    scores = [turn_score(of, 1) for of in two]
    scores += [turn_score(of, 2, ln(0.5), ln(p)) for of, p in zip(two, (0.9, 0.1), strict=True)]
    scores.sort(key=lambda score: score.sample_index)
    for rule, expected in (("keep", [0.4, -0.4]), ("drop", [0.4, None])):
        config = Config.model_validate(
            {"mem_reward": UNFILTERED | {"ill_formed": rule}, "advantage": {"single": "zero"}}
        )
        _, table = build(two, {"q": question()}, scores, config, round_index=0)
        found = [row.mem_reward for row in table if row.turn == 2]
        assert found == [pytest.approx(value) if value is not None else None for value in expected]
        advantage = [row.mem_advantage for row in table if row.turn == 2]
        # .4 and -.4: mean 0, std .5657; a pool of one under `zero` has none
        assert advantage == (pytest.approx([0.7071, -0.7071], abs=1e-4) if rule == "keep" else [0.0, 0.0])


def test_unit_variance_on_worked_values() -> None:
    # sums 1 + 1 = 2 and -1 + 1 = 0: rms sqrt(4 / 2) = 1.41421; the segment without a reward stays as it is
    found = advantages.unit_variance([1.0, -1.0], [[0.0, 1.0], [1.0]], [[None, 0.3], [0.1]])
    assert found[0] == pytest.approx([0.0, 2 / math.sqrt(2) - 1])
    assert found[1] == pytest.approx([1.0])  # 0 / rms + 1
    assert advantages.unit_variance([0.0], [[0.0]], [[0.2]]) == [[0.0]]


def test_memory_rewards_less_their_mean_alone() -> None:
    rewards, groups = [[0.5, 0.1], [0.3]], ["q", "q"]
    assert advantages.memory_advantages(rewards, groups, normalize_std=False)[0] == pytest.approx([0.2, -0.2])
    config = Config.model_validate({"mem_reward": UNFILTERED, "advantage": {"mem_normalize_std": False}})
    two = [trajectory([turn(3, 2), turn(5, 4, (1, 3))], sample=i) for i in (0, 1)]
    pairs = zip(two, (0.9, 0.1), strict=True)
    scores = [score for t, p in pairs for score in (turn_score(t, 1), turn_score(t, 2, ln(0.5), ln(p)))]
    _, table = build(two, {"q": question()}, scores, config, round_index=0)
    assert [row.mem_advantage for row in table if row.turn == 2] == pytest.approx([0.4, -0.4])


VALUES = st.floats(-3, 3)


@given(st.lists(st.tuples(VALUES, st.lists(VALUES, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_unit_variance_gives_sums_of_mean_square_one(rows: list[tuple[float, list[float]]]) -> None:
    outcomes, memory = [outcome for outcome, _ in rows], [values for _, values in rows]
    found = advantages.unit_variance(outcomes, memory, memory)
    sums = [outcome + value for outcome, row in zip(outcomes, found, strict=True) for value in row]
    before = [outcome + value for outcome, row in rows for value in row]
    if any(abs(value) > 1e-6 for value in before):
        assert sum(value**2 for value in sums) / len(sums) == pytest.approx(1.0)


def test_unit_variance_reaches_the_samples() -> None:
    of = [trajectory([turn(3, 2), turn(5, 4, (1, 3))], sample=i, answer=a) for i, a in enumerate(("Paris", "Rome"))]
    scores = [
        s for t, p in zip(of, (0.9, 0.1), strict=True) for s in (turn_score(t, 1), turn_score(t, 2, ln(0.5), ln(p)))
    ]
    config = Config.model_validate({"mem_reward": UNFILTERED, "advantage": {"unit_variance": True}})
    samples, _ = build(of, {"q": question()}, scores, config, round_index=0)
    sums = [s.outcome_advantage + s.memory_advantages[6] for s in samples if s.key.endswith("/2")]
    assert sums == pytest.approx([1.0, -1.0])  # +-(.7071 + .7071) over their rms
    assert all(s.memory_advantages[5] == 0.0 for s in samples if s.key.endswith("/2"))  # outside the span


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mem_reward": {"mask": "none", "quantile": 0.3}}, "mem_reward.quantile"),
        ({"mem_reward": {"separators": False, "answer_tokens": "last_four"}}, "mem_reward.separators"),
        ({"mem_reward": {"kind": "p_mem"}, "scoring": {"full_scorer": "reference"}}, "scoring.full_scorer"),
        ({"mem_reward": {"kind": "increment"}, "scoring": {"baseline": "seen"}}, "scoring.baseline"),
        ({"mem_reward": {"discount": 0.9}}, "mem_reward.return_horizon and scoring.lookahead"),
        ({"mem_reward": {"discount": 0.0}}, "mem_reward.discount"),
        ({"scoring": {"lookahead": -1}}, "scoring.lookahead"),
    ],
)
def test_combinations_that_would_do_nothing_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        checked(values)


@pytest.mark.parametrize(
    "values",
    [
        # p_full also decides which tokens, and which turns, p_mem is taken of.
        {"mem_reward": {"kind": "p_mem", "mask": "shared"}, "scoring": {"baseline": "seen"}},
        {"mem_reward": {"kind": "p_mem", "quantile": 0.2}, "scoring": {"baseline": "seen"}},
        {"mem_reward": {"kind": "increment", "empty": "skip"}, "scoring": {"full_scorer": "reference"}},
        # Nothing is scored: a policy without memory reward under settings that others share.
        {"mem_reward": {"kind": "p_mem"}, "scoring": {"baseline": "seen"}, "advantage": {"mem_weight": 0.0}},
        {"advantage": {"mem_weight": 0.0, "unit_variance": True}},
        {"mem_reward": {"discount": 0.9}, "scoring": {"lookahead": 1}},
        {"mem_reward": {"discount": 0.9, "return_horizon": 1}},
    ],
)
def test_combinations_that_count_are_taken(values: dict[str, Any]) -> None:
    checked(values)


def test_a_warm_start_of_no_steps_is_the_starting_policy(tmp_path: Path, tiny_policy: Path) -> None:
    from mempo.warmstart import warm_start
    from mempo.workspace import Workspace

    config = checked({"model": {"path": str(tiny_policy)}, "warmstart": {"num_steps": 0}})
    published = warm_start(Workspace(tmp_path).run("warmstart", config, {"data": "a"}))
    weights = "model.safetensors"
    assert (published / weights).read_bytes() == (tiny_policy / weights).read_bytes()

"""Advantages, gates and weights that tests/golden lacks, by hand."""

from __future__ import annotations

import math

import pytest

from mempo.advantages import (
    gates,
    memory_advantages,
    outcome_advantages,
    span_advantages,
    token_advantages,
    token_weights,
)

ROOT_HALF = 1 / math.sqrt(2)


# ---------------------------------------------------------------- outcome


@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_scores_give_exactly_zero(score: float) -> None:
    assert outcome_advantages([score] * 16, ["q"] * 16) == [0.0] * 16


def test_without_division_by_the_std() -> None:
    assert outcome_advantages([1, 0, 0, 0], ["q"] * 4, normalize_std=False) == [0.75, -0.25, -0.25, -0.25]
    assert outcome_advantages([1.0], ["q"], normalize_std=False) == [1.0]  # a group of one has mean 0


def test_a_failed_tool_is_in_no_group() -> None:
    found = outcome_advantages([1, None, 0], ["q", "q", "q"])
    # mean 0.5, std sqrt(0.5) of the two that count
    assert found == pytest.approx([ROOT_HALF, 0.0, -ROOT_HALF], abs=1e-5)


def test_groups_interleaved_are_the_groups_in_order() -> None:
    apart = outcome_advantages([1, 0, 0, 1, 1, 0], list("aaabbb"))
    mixed = outcome_advantages([1, 1, 0, 1, 0, 0], list("ababab"))
    assert mixed == [apart[i] for i in (0, 3, 1, 4, 2, 5)]


# ---------------------------------------------------------------- memory

REWARDS = [[0.0, 0.4], [0.2, 0.8]]
TURNS = [[2, 3], [2, 3]]


def test_pools_per_turn() -> None:
    found = memory_advantages(REWARDS, ["q", "q"], turns=TURNS, pool="question_turn")
    # turn 2: 0.0 and 0.2, mean 0.1, std 0.1 sqrt 2; turn 3: 0.4 and 0.8
    assert found == [pytest.approx([-ROOT_HALF] * 2, abs=1e-5), pytest.approx([ROOT_HALF] * 2, abs=1e-5)]


def test_pools_per_turn_keep_questions_apart_and_need_turns() -> None:
    found = memory_advantages([[0.3], [0.9]], ["a", "b"], turns=[[2], [2]], pool="question_turn", single="zero")
    assert found == [[0.0], [0.0]]
    with pytest.raises(ValueError, match="pass turns"):
        memory_advantages(REWARDS, ["q", "q"], pool="question_turn")


def test_one_pool_for_the_batch() -> None:
    found = memory_advantages([[0.0], [1.0]], ["a", "b"], pool="batch")
    assert found == [pytest.approx([-ROOT_HALF], abs=1e-5), pytest.approx([ROOT_HALF], abs=1e-5)]


def test_a_pool_of_one() -> None:
    assert memory_advantages([[0.4]], ["q"]) == [pytest.approx([0.4], abs=1e-6)]
    assert memory_advantages([[0.4]], ["q"], single="zero") == [[0.0]]
    # the other reward of the question is no signal, so this is a pool of one as well
    assert memory_advantages([[0.4, None]], ["q"], single="zero") == [[0.0, 0.0]]


def test_a_reward_of_none_is_in_no_pool_and_gets_zero() -> None:
    found = memory_advantages([[None, 0.0], [1.0]], ["q", "q"])
    assert found == [pytest.approx([0.0, -ROOT_HALF], abs=1e-5), pytest.approx([ROOT_HALF], abs=1e-5)]
    assert found[0][0] == 0.0


def test_a_pool_flatter_than_the_floor_gives_zero() -> None:
    rewards = [[0.01, 0.02], [0.03]]  # std 0.01
    assert memory_advantages(rewards, ["q", "q"], std_floor=0.011) == [[0.0, 0.0], [0.0]]
    kept = memory_advantages(rewards, ["q", "q"], std_floor=0.009)
    assert kept == [pytest.approx([-1.0, 0.0], abs=1e-3), pytest.approx([1.0], abs=1e-3)]
    # the floor speaks of pools with a spread: a pool of one is decided by `single`
    assert memory_advantages([[0.4]], ["q"], std_floor=5.0) == [pytest.approx([0.4], abs=1e-6)]


def test_equal_memory_rewards_give_exactly_zero() -> None:
    assert memory_advantages([[0.2, 0.2], [0.2]], ["q", "q"]) == [[0.0, 0.0], [0.0]]


# ---------------------------------------------------------------- tokens


def test_gates() -> None:
    outcomes, values = [1.0, 0.2, 0.0], [0.8, 0.0, -0.8]
    assert gates(outcomes, values) == [1.0, 1.0, 1.0]
    assert gates(outcomes, values, rule="outcome_nonnegative") == [1.0, 1.0, 0.0]
    assert gates(outcomes, values, rule="outcome_correct") == [1.0, 0.0, 0.0]


def test_every_token_of_the_loss_carries_the_outcome_and_the_span_the_memory_too() -> None:
    memory = span_advantages(6, [(3, 5)], [0.5])  # two prompt tokens, four response tokens
    assert memory == [0, 0, 0, 0.5, 0.5, 0]
    mask = [0, 0, 1, 1, 1, 1]
    # 2 + 0.4 * 0.5 on the span
    assert token_advantages(2.0, memory, mask, mem_weight=0.4) == [0, 0, 2.0, 2.2, 2.2, 2.0]
    assert token_advantages(2.0, memory, mask, mem_weight=0.4, gate=0.0) == [0, 0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 8, 1 / 8, 0, 1 / 8]),
        ("turn-mean", [1 / (3 * 2), 1 / (3 * 5), 0, 1 / (3 * 1)]),
        ("trajectory-mean", [1 / (2 * 7), 1 / (2 * 7), 0, 1 / (2 * 1)]),
        ("constant", [1 / (3 * 64), 1 / (3 * 64), 0, 1 / (3 * 64)]),
    ],
)
def test_a_sample_without_tokens_is_in_no_denominator(aggregation: str, expected: list[float]) -> None:
    found = token_weights([2, 5, 0, 1], ["a", "a", "b", "c"], aggregation=aggregation, max_response_tokens=64)
    assert found == pytest.approx(expected)


def test_nothing_to_train_on() -> None:
    assert token_weights([0, 0], ["a", "b"], max_response_tokens=8) == [0.0, 0.0]
    assert outcome_advantages([], []) == []
    assert memory_advantages([], []) == []

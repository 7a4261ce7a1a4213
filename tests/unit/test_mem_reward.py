"""The memory reward's options that tests/golden lacks, by hand."""

from __future__ import annotations

import math

import pytest

from mempo.mem_reward import (
    answer_mask,
    gold_spans,
    gold_text,
    last_four_mask,
    memory_reward,
    quantile_threshold,
    turn_rewards,
)

HALF, QUARTER, TENTH = math.log(0.5), math.log(0.25), math.log(0.1)
NINE = math.log(0.9)


def test_the_arithmetic_mean_is_of_probabilities() -> None:
    found = memory_reward([NINE, HALF], [NINE, TENTH], [1, 1], mask="none", average="arithmetic")
    # (0.9 + 0.5) / 2 = 0.7; (0.9 + 0.1) / 2 = 0.5
    assert (found.p_full, found.p_mem, found.reward) == pytest.approx((0.7, 0.5, -0.2))


def test_skip_gives_no_reward_where_a_side_keeps_nothing() -> None:
    found = memory_reward([NINE, NINE], [TENTH, TENTH], [1, 1], empty="skip")
    assert found.p_full == pytest.approx(0.9)
    assert (found.p_mem, found.reward, found.kept_full, found.kept_mem) == (None, None, 2, 0)
    assert memory_reward([NINE], [NINE], [1], empty="skip").reward == 0
    assert memory_reward([NINE], [NINE], [0], empty="skip").reward is None


def test_one_pays_a_memory_that_knows_nothing_and_zero_does_not() -> None:
    sides = ([NINE], [TENTH], [1])
    assert memory_reward(*sides, empty="one").reward == pytest.approx(0.1)  # 1 - 0.9
    assert memory_reward(*sides, empty="zero").reward == pytest.approx(-0.9)  # 0 - 0.9


def test_shared_mask_takes_a_token_on_both_sides() -> None:
    found = memory_reward([NINE, NINE], [NINE, TENTH], [1, 1], mask="shared")
    assert found.p_mem == pytest.approx(math.sqrt(0.9 * 0.1))
    assert (found.kept_full, found.kept_mem) == (2, 2)


def test_a_threshold_of_zero_keeps_all_but_the_impossible() -> None:
    found = memory_reward([NINE, TENTH], [-math.inf, TENTH], [1, 1], threshold=0.0)
    assert (found.kept_full, found.kept_mem) == (2, 1)
    assert memory_reward([NINE], [-math.inf], [1], mask="none").p_mem == 0


def test_reward_cap_clips_every_kind() -> None:
    sides = ([NINE], [TENTH], [1])
    # log(1e-8) - log(0.9 + 1e-8) = -18.3
    assert memory_reward(*sides, empty="zero", kind="log_ratio").reward == pytest.approx(-18.3153, abs=1e-4)
    assert memory_reward(*sides, empty="zero", kind="log_ratio", reward_cap=5.0).reward == -5.0
    assert memory_reward(*sides, kind="p_mem", reward_cap=0.5).reward == 0.5
    # 0.5 / 1e-8 * 100 / 10 = 5e8
    compression = turn_rewards([0.0], [0.5], [10], [100], kind="compression")
    assert compression == pytest.approx([5e8])
    assert turn_rewards([0.0], [0.5], [10], [100], kind="compression", reward_cap=20.0) == [20.0]


def test_unequal_lengths_and_nan_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        memory_reward([NINE], [NINE, NINE], [1, 1])
    with pytest.raises(ValueError, match="NaN"):
        memory_reward([math.nan], [NINE], [1])


# ---------------------------------------------------------------- turn_rewards


def test_increment_is_against_the_scored_turn_before() -> None:
    found = turn_rewards([0.9] * 3, [0.2, 0.5, 0.4], [5] * 3, [50] * 3, kind="increment")
    assert found == pytest.approx([0.2, 0.3, -0.1])


def test_log_ratio_and_p_mem() -> None:
    assert turn_rewards([0.5], [0.25], [5], [50], kind="p_mem") == [0.25]
    assert turn_rewards([0.5], [0.25], [5], [50], kind="log_ratio") == pytest.approx([math.log(0.5)], abs=1e-6)


def test_the_order_is_cap_then_penalty_then_return() -> None:
    found = turn_rewards(
        [0.0, 0.0],
        [0.9, 0.2],
        [64, 32],
        [100, 100],
        length_penalty=0.4,
        max_mem_tokens=128,
        return_horizon=5,
        discount=0.5,
        reward_cap=0.6,
    )
    # 0.6 - 0.4 * 64 / 128 = 0.4 and 0.2 - 0.4 * 32 / 128 = 0.1; (0.4 + 0.5 * 0.1) / 1.5 = 0.3
    assert found == pytest.approx([0.3, 0.1])


def test_nothing_scored_and_a_discount_of_zero() -> None:
    assert turn_rewards([], [], [], []) == []
    assert turn_rewards([0.0, 0.0], [0.3, 0.1], [1, 1], [1, 1], return_horizon=2, discount=0.0) == [0.3, 0.1]


def test_quantile_threshold_is_joint_and_linear() -> None:
    logprobs = [NINE, HALF, QUARTER, TENTH]  # sorted: .1 .25 .5 .9
    assert quantile_threshold(logprobs, 0.0) == pytest.approx(0.1)
    assert quantile_threshold(logprobs, 0.5) == pytest.approx(0.375)  # between .25 and .5
    assert quantile_threshold([*logprobs, -math.inf], 0.0) == 0
    assert quantile_threshold([], 0.5) == 0


# ---------------------------------------------------------------- the answer's tokens


def test_gold_text_and_its_spans() -> None:
    assert gold_text([["Ulm", "Ulm, Germany"], ["Rome"]]) == "Ulm; Rome"
    assert gold_spans([["Ulm"], ["Rome"]], offset=10) == [(10, 13), (15, 19)]
    assert gold_text([["里德学院"], ["Ulm"]]) == "里德学院；Ulm"
    assert gold_spans([["里德学院"], ["Ulm"]]) == [(0, 4), (5, 8)]
    assert gold_text(["Paris"]) == "Paris"


def test_answer_mask_takes_overlap_and_separators_by_choice() -> None:
    # characters:  "\n" 0, "Ulm" 1-4, "; " 4-6, "Rome." 6-11, "\n</answer>" 11-
    spans = [(1, 4), (6, 10)]
    starts = [0, 1, 4, 5, 9, 11, 13]
    ends = [1, 4, 5, 9, 11, 13, 21]  # "\n" "Ulm" ";" " Rom" "e." "\n<" "/answer>"
    assert answer_mask(starts, ends, spans) == [0, 1, 1, 1, 1, 0, 0]
    assert answer_mask(starts, ends, spans, separators=False) == [0, 1, 0, 1, 1, 0, 0]


def test_a_gold_whose_end_merges_with_the_line_end_counts_that_token() -> None:
    # "10%" is characters 1-4, its tokens "10" and "%\n" (one token over the edge); zero-width tokens are in no text
    assert answer_mask([0, 1, 3, 3, 5], [1, 3, 3, 5, 7], [(1, 4)]) == [0, 1, 0, 1, 0]
    assert answer_mask([], [], []) == []


def test_last_four_is_right_for_ulm_and_shifted_for_apple_inc() -> None:
    # probe: "<answer>\n" | Ulm | "\n" "</" "answer" ">"
    assert last_four_mask(7, 1) == [0, 0, 1, 0, 0, 0, 0]
    # Apple Inc. alone is 3 tokens; in the probe ".\n" is one token, so the rule begins a token too early
    # "<answer>" "\n" "Apple" " Inc" ".\n" "</" "answer" ">"
    assert last_four_mask(8, 3) == [0, 1, 1, 1, 0, 0, 0, 0]

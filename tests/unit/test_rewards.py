"""Does the answer match? Cases beyond tests/golden/answers.json."""

from __future__ import annotations

import pytest

from mempo.records import Question, Trajectory, Turn
from mempo.rewards import outcome_reward, score_answer


def turn(*, valid: bool = True) -> Turn:
    return Turn(
        prompt_ids=[1],
        response_ids=[2],
        sampling_logprobs=[-0.1],
        text="<think>a</think><answer>Ulm</answer>",
        valid=valid,
        memory=None,
        mem_span=None,
        action="answer",
        argument="Ulm",
        observation="<answer>Ulm</answer>",
        observation_ids=[],
        finish_reason="stop",
    )


def trajectory(answer: str | None, *, valid: tuple[bool, ...] = (True, True)) -> Trajectory:
    return Trajectory("q", 0, 0, [turn(valid=v) for v in valid], answer, "answered" if answer else "max_turns")


ULM = Question("q", "Where?", [["Ulm"]])
TWO = Question("q", "Where, and who?", [["Ulm"], ["Gunter Czisch"]])


# ---------------------------------------------------------------- score_answer


@pytest.mark.parametrize("gold", ["The The", "!!!", "---", ")", "a"])
def test_a_gold_that_normalises_to_nothing_matches_itself_alone(gold: str) -> None:
    assert score_answer("", [[gold]]).em == 0
    assert score_answer("?", [[gold]]).em == 0
    assert score_answer(f" {gold.upper()} ", [[gold]]) == score_answer("Ulm", [["Ulm"]])


def test_an_empty_alias_is_none() -> None:
    assert score_answer("", [["", " ", "Ulm"]]).em == 0
    assert score_answer("Ulm", [["", "Ulm"]]).em == 1
    assert score_answer("", [[""]]) == score_answer("x", [["Ulm"]])


def test_em_mean_and_f1_are_means_over_objectives() -> None:
    score = score_answer("Ulm; Czisch", [["Ulm"], ["Gunter Czisch"]])
    # objective 2: precision 1/1, recall 1/2 -> 2/3
    assert (score.em, score.em_mean, score.f1) == (0, 0.5, pytest.approx((1 + 2 / 3) / 2))


def test_f1_counts_repeated_words() -> None:
    # shared: new once, york once; 2 * 2 / (3 + 4)
    assert score_answer("new york york", [["new new york city"]]).f1 == pytest.approx(4 / 7)


@pytest.mark.parametrize("prediction", ["里德学院。", "里德学院", "「里德学院」", " 里德 学院 ", "里德学院!"])
def test_unicode_is_the_default_where_the_gold_is_not_ascii(prediction: str) -> None:
    assert score_answer(prediction, [["里德学院"]]).em == 1
    assert score_answer("里德学院。", [["里德学院"]], "squad").em == 0


def test_full_width_semicolons_separate_under_unicode() -> None:
    assert score_answer("里德学院；乌尔姆。", [["里德学院"], ["乌尔姆"]]).em == 1
    assert score_answer("Ulm；Rome", [["Ulm"], ["Rome"]], "squad").em == 0


def test_chinese_is_compared_per_character() -> None:
    # shared 学 院 of 里德学院 (4) and 学院 (2): 2 * 2 / 6
    assert score_answer("学院", [["里德学院"]]).f1 == pytest.approx(2 / 3)


def test_compatibility_forms_and_other_scripts() -> None:
    assert score_answer("１０％", [["10% – Москва"]], "unicode").f1 == pytest.approx(2 / 3)  # 10 of {10, москва}
    assert score_answer("МОСКВА", [["Москва"]]).em == 1
    assert score_answer("the São Paulo", [["São Paulo"]]).em == 1


# ---------------------------------------------------------------- outcome_reward


def test_one_where_every_turn_is_valid_and_every_objective_matches() -> None:
    assert outcome_reward(trajectory("ulm."), ULM) == 1
    assert outcome_reward(trajectory("ulm.", valid=(False, True)), ULM) == 0
    assert outcome_reward(trajectory("Ulm; nobody"), TWO) == 0
    assert outcome_reward(trajectory("Ulm; nobody; Gunter Czisch"), TWO) == 0


def test_no_answer_is_no_reward_whatever_the_observations_say() -> None:
    for options in ({}, {"format_credit": 0.2}, {"kind": "f1", "require_format": False}):
        assert outcome_reward(trajectory(None), ULM, **options) == 0


def test_other_kinds() -> None:
    assert outcome_reward(trajectory("Ulm; nobody"), TWO, kind="em_mean") == 0.5
    assert outcome_reward(trajectory("Ulm; Czisch"), TWO, kind="f1") == pytest.approx(5 / 6)


def test_format_credit_and_a_format_that_is_not_required() -> None:
    # value + 0.2 * (1 - value)
    assert outcome_reward(trajectory("Rome"), ULM, format_credit=0.2) == pytest.approx(0.2)
    assert outcome_reward(trajectory("Ulm"), ULM, format_credit=0.2) == 1
    assert outcome_reward(trajectory("Ulm; x"), TWO, kind="em_mean", format_credit=0.2) == pytest.approx(0.6)
    bad = trajectory("Ulm", valid=(True, False))
    assert outcome_reward(bad, ULM, format_credit=0.2) == 0
    assert outcome_reward(bad, ULM, format_credit=0.2, require_format=False) == 1

"""Records are checked at birth: what a data row may give as an answer, and lengths that must agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mempo import rewards, storage
from mempo.mem_reward import gold_text
from mempo.records import Question, Trajectory
from tests.unit.builders import probe_score, trajectory, turn, turn_score


def asked(*golds: Any, text: str = "Who?") -> Question:
    return Question("q", text, list(golds))


@pytest.mark.parametrize(
    ("golds", "kept"),
    [
        (["Ulm"], [["Ulm"]]),
        ([["Ulm", "Ulm, Germany"]], [["Ulm", "Ulm, Germany"]]),
        (["Ulm", ["Bern", ""]], [["Ulm"], ["Bern"]]),
        ([["", " ", "Ulm"]], [["Ulm"]]),
        ([("a", "b")], [["a", "b"]]),
        (["a; b"], [["a; b"]]),  # one objective is never split
        (['["Ulm"]', "['Ulm']"], [['["Ulm"]'], ["['Ulm']"]]),  # text that looks like a list is text
    ],
)
def test_answers_become_aliases_by_objective(golds: list[Any], kept: list[list[str]]) -> None:
    assert asked(*golds).golden_answers == kept


@pytest.mark.parametrize("golds", [[], [[]], [""], [" \n"], [["", "  "]], ["Ulm", ""], ["Ulm", []]])
def test_an_objective_without_an_answer_is_refused_by_its_id(golds: list[Any]) -> None:
    with pytest.raises(ValueError, match="question 'q': every objective needs"):
        asked(*golds)


@pytest.mark.parametrize("gold", ["a; b", "a；b", ";"])
def test_a_separator_inside_one_of_several_golds_is_refused(gold: str) -> None:
    with pytest.raises(ValueError, match="question 'q': a golden answer of several holds"):
        asked("Ulm", gold)


@pytest.mark.parametrize(
    "gold", ["George VI\n", "Yes", "No", "None", "Nan", "N/A", "null", "1", "a\u0085b", "&quot;x&quot;"]
)
def test_odd_answers_stay_themselves_on_disk_and_are_matched(tmp_path: Path, gold: str) -> None:
    question = asked(gold, text="no mark\u0085at the end")
    storage.write_records(tmp_path / "q.parquet", [question])
    assert storage.read_records(tmp_path / "q.parquet", Question) == [question]
    assert gold_text(question.golden_answers) == gold
    assert rewards.score_answer(gold.strip(), question.golden_answers).em == 1.0
    assert rewards.score_answer(None, question.golden_answers).em == 0.0
    assert rewards.score_answer("Ulm", question.golden_answers).em == 0.0


def test_lengths_and_spans_are_checked_at_birth() -> None:
    with pytest.raises(ValueError, match=r"Turn.sampling_logprobs has 1 entries, expected 4"):
        turn(3, 4, sampling_logprobs=[0.0])
    for span in ((0, 5), (2, 2), (3, 1), (-1, 2)):
        with pytest.raises(ValueError, match="is outside its 4 response tokens"):
            turn(3, 4, span)
    with pytest.raises(ValueError, match=r"ProbeScore.mem_logprobs has 1 entries, expected 2"):
        turn_score(Trajectory("q", 0, 0, trajectory([turn(3, 2)]).turns, None, "no_action"), 1, [-0.1, -0.2], [-0.1])
    with pytest.raises(ValueError, match=r"ProbeScore.ahead_logprobs has 3 entries, expected 1"):
        probe_score([-0.1], [-0.2], ahead_logprobs=[[0.0], [0.0] * 3])
    with pytest.raises(ValueError, match=r"TurnScore.reason None with 0 probes"):
        replace(turn_score(trajectory([turn(3, 2)]), 1), reason=None)

"""The evaluation figures, by hand."""

from __future__ import annotations

import pytest

from mempo.config import Config
from mempo.evaluation import rows, summary
from tests.unit.builders import question, trajectory, turn


def test_rows_and_summary():
    questions = {"q": question(), "two": question("two", [["Ulm"], ["Rome"]])}
    found = [
        trajectory([turn(3, 2), turn(6, 4, (0, 2))]),
        trajectory([turn(3, 2, valid=False)], "two", answer="Ulm; Bonn"),
    ]
    sampled = rows("mempo", found, questions, Config(), greedy=False)
    first, second = sampled
    assert (first.em, first.turns, first.total_tokens, first.peak_tokens, first.format) == (1.0, 2, 15, 10, True)
    assert first.dependency == 2 * (3 + 1) + 4 * (6 + 2)
    assert (second.em, second.em_mean, second.num_objectives, second.format) == (0.0, 0.5, 2, False)
    greedy = rows(
        "mempo", [found[0], trajectory([turn(3, 2)], "two", answer="Ulm; Rome")], questions, Config(), greedy=True
    )
    figures = summary(sampled + greedy)
    assert figures["em"] == 0.5 and figures["em_greedy"] == 1.0
    assert figures["em_mean"] == 0.75 and figures["format_rate"] == 0.5
    assert figures["total_tokens"] == 10.0 and figures["num_questions"] == 2


def test_a_failed_tool_is_no_wrong_answer():
    right = trajectory([turn(3, 2)])
    failed = trajectory([turn(3, 2)], "two", answer=None, status="tool_failed")
    questions = {"q": question(), "two": question("two")}
    found = [row for greedy in (False, True) for row in rows("p", [right, failed], questions, Config(), greedy=greedy)]
    figures = summary(found)
    assert figures["em"] == 1.0 and figures["num_questions"] == 1 and figures["tool_failed"] == 0.5
    with pytest.raises(ValueError, match="failed in all 1"):
        summary([row for row in found if row.status == "tool_failed"])


def test_no_answer_scores_nothing():
    found = [trajectory([turn(3, 2)], answer=None, status="max_turns")]
    (row,) = rows("mempo", found, {"q": question()}, Config(), greedy=False)
    assert (row.em, row.f1, row.status) == (0.0, 0.0, "max_turns")

"""Detectors of ways to earn reward without a useful memory: small trajectories, each share counted by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from mempo.diagnoses import strategies
from mempo.quality import Chain
from mempo.records import Turn
from mempo.rounds import RoundRecords
from tests.unit.builders import question, trajectory, turn

CHAIN = [("Lyon", "France"), ("France", "Euro")]


def said(memory: str | None, tokens: int = 3, **fields: Any) -> Turn:
    """A turn of 10 response tokens, of which ``tokens`` are its memory."""
    return turn(5, 10, None if memory is None else (0, tokens), memory=memory, **fields)


def rows(*attempts: list[Turn], facts: dict[str, list[Chain]] | None = None, **fields: Any):
    asked = {"q": question("q")}  # "Question q?"
    of = [trajectory(turns, sample=i, **fields) for i, turns in enumerate(attempts)]
    return strategies.turns([RoundRecords(of, asked, [], [])], facts or {})


def values(column: pd.Series[Any]) -> list[Any]:
    return [None if pd.isna(value) else value for value in column]


FIRST = said(None, observation="Lyon: country France.", argument="Lyon")


def test_a_copy_is_word_for_word():
    found = rows([FIRST, said("country France"), said("Country  France!"), said("France"), said("")])
    # turn 2 has no memory before it; letter case, blanks and marks make no other memory; an empty one is no copy
    assert values(found["copied"]) == [None, None, True, False, None]
    assert strategies.figures(found)["strategy/copied"] == 0.5


def test_words_that_nothing_shown_holds():
    second = said("country France, currency Euro", observation="France: currency Franc.")
    found = rows([FIRST, second, said("currency Euro q")])
    # turn 2: currency and euro of four words; turn 3: euro of three, for "q" stands in the question
    assert found["unseen"].tolist()[1:] == [0.5, pytest.approx(1 / 3)]
    assert strategies.figures(found)["strategy/front_loaded"] == 0.5


def test_an_answer_before_all_facts_were_seen():
    answer = said("country France", action="answer", argument="Euro", observation=None)
    fast = [FIRST, answer]
    slow = [FIRST, said("country France", observation="France: currency Euro."), answer]
    found = rows(fast, slow, facts={"q": [CHAIN]})
    assert found["early"].dropna().tolist() == [True, False]
    assert strategies.figures(found)["strategy/early"] == 0.5
    unknown = rows(fast, slow)  # then turns count: 2 is early, 3 is not
    assert unknown["early"].dropna().tolist() == [True, False]
    assert rows(fast, slow, facts={"q": [CHAIN[:1]]})["early"].dropna().tolist() == [False, False]


def test_empty_and_over_long_memories():
    # before turn 2 stand 10 response and 2 observation tokens, before turn 3 twice that
    found = rows([FIRST, said(" .\n"), said("x", tokens=3)], [turn(5, 1), said("y", tokens=4), said("y", tokens=9)])
    assert values(found["empty"]) == [None, True, False, None, False, False]
    assert values(found["over_long"]) == [None, False, False, None, True, False]  # 4 tokens for 1 + 2
    figures = strategies.figures(found)
    assert figures["strategy/empty"] == 0.25 and figures["strategy/over_long"] == 0.25


def test_searches_for_what_only_the_memory_held():
    second = said("country France", argument="France", observation="France: currency Euro.")
    third = said("Lyon country France", argument="Lyon of q", observation="nothing")
    found = rows([FIRST, second, third, said("France", argument="Peru")])
    # France stands in the latest observation; Lyon no more, but in the memory; Peru stands nowhere
    assert found["memory_only"].dropna().tolist() == [False, True, False]
    assert strategies.figures(found)["strategy/memory_only"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("memories", "share"),
    [
        ([["a", "b", "c"], ["a", "b", "c"]], 0.5),  # ab bc ab bc
        ([["a", "b"], ["b", "a"]], 1.0),
        ([["a", "b"], [], ["c"]], 1.0),
        ([["a"], []], None),
    ],
)
def test_distinct_pairs_of_words(memories: list[list[str]], share: float | None):
    assert strategies.distinct_2(memories) == share


def test_distinct_pairs_are_counted_within_a_question_and_turn():
    found = rows([FIRST, said("x y"), said("c d")], [FIRST, said("x y"), said("e f")], [FIRST])
    assert strategies.figures(found)["strategy/distinct_2"] == pytest.approx((0.5 + 1.0) / 2)
    table = strategies.table(found).set_index("turn")
    assert table["distinct_2"].tolist() == pytest.approx([0.5, 1.0, 0.75])
    assert table["memories"].tolist() == [2, 2, 4] and table.index.tolist() == ["2", "3", "all"]


def test_chinese_is_compared_by_character():
    found = rows([said(None, observation="乌尔姆位于德国。"), said("乌尔姆法")])
    assert found["unseen"].tolist()[1] == 0.25


def test_a_failed_tool_and_turns_without_memory_are_in_no_statistic():
    assert rows([FIRST, said("x y")], status="tool_failed").empty
    found = rows([FIRST, said(None), said(None, action="answer", observation=None)])
    assert strategies.table(found).empty  # nobody writes a memory here: the full context
    assert strategies.figures(found)["strategy/early"] == 0.0

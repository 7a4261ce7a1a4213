"""A few trajectories turn by turn, ready to be shown: chosen by a rule, texts left raw for the page to escape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import pandas as pd

from mempo.records import Question, Trajectory, Turn
from mempo.tags import parse_turn


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive characters of a response; ``memory`` where they are ``<mem>..</mem>``."""

    text: str
    memory: bool


@dataclass(frozen=True, slots=True)
class TurnView:
    turn: Turn
    pieces: list[Piece]
    mem_reward: float | None
    p_mem: float | None
    p_full: float | None


@dataclass(frozen=True, slots=True)
class Excerpt:
    question: Question
    trajectory: Trajectory
    score: float
    turns: list[TurnView]

    @property
    def golds(self) -> str:
        return "; ".join(aliases[0] for aliases in self.question.golden_answers)


def choose(
    trajectories: Sequence[Trajectory], questions: Mapping[str, Question], rewards: pd.DataFrame, count: int = 3
) -> list[Excerpt]:
    """``count`` trajectories: the longest that scored, the longest that did not, then the longest of the rest.

    ``rewards`` are the TurnReward rows of the same round; of equally long ones the first; what has no rows (a tool that
    failed) is left out.
    """
    rows = {key: group.set_index("turn") for key, group in rewards.groupby(["question_id", "sample_index"])}
    scored = {t.key: t for t in trajectories if (t.question_id, t.sample_index) in rows}
    by_length = sorted(scored.values(), key=lambda t: -len(t.turns))
    scores = {t.key: float(rows[t.question_id, t.sample_index]["score"].iloc[0]) for t in by_length}
    right = [t for t in by_length if scores[t.key] > 0]
    wrong = [t for t in by_length if scores[t.key] <= 0]
    chosen = {t.key: t for t in (*right[:1], *wrong[:1], *by_length)}
    return [
        Excerpt(questions[t.question_id], t, scores[key], _views(t, rows[t.question_id, t.sample_index]))
        for key, t in list(chosen.items())[:count]
    ]


def _views(trajectory: Trajectory, rows: pd.DataFrame) -> list[TurnView]:
    figures: dict[Any, dict[Any, float]] = rows[["mem_reward", "p_mem", "p_full"]].astype(float).to_dict("index")
    return [
        TurnView(turn, pieces(turn.text, i), **{name: None if isnan(v) else v for name, v in figures[i].items()})
        for i, turn in enumerate(trajectory.turns, start=1)
    ]


def pieces(text: str, turn: int) -> list[Piece]:
    """``text`` cut at the segment that was taken as the turn's memory; the pieces join to ``text``."""
    start, end = parse_turn(text, turn).memory_chars or (0, 0)
    cut = (Piece(text[:start], False), Piece(text[start:end], True), Piece(text[end:], False))
    return [piece for piece in cut if piece.text]

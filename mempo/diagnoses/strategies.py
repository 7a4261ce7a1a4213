"""Ways of writing memories that may earn reward without being useful, each as a share that people can watch.

Words are those of ``rewards.normalized_words``: case-folded, without punctuation, Chinese per character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pandas as pd

from mempo.quality import Chain, known_hops
from mempo.records import Question, Trajectory
from mempo.rewards import normalized_words
from mempo.rounds import RoundRecords

EARLY_TURN = 2  # an answer up to this turn is early where the facts are not known
COLUMNS = ["round", "question_id", "turn", "words", "mem_tokens", "empty", "over_long", "copied", "unseen",
           "memory_only", "early"]  # fmt: skip
Words = Callable[[str], list[str]]


def turns(rounds: Sequence[RoundRecords], facts: Mapping[str, list[Chain]]) -> pd.DataFrame:
    """One row a turn; NaN where a detector does not apply. Trajectories whose tool failed are in no statistic.

    words: of the memory. empty, over_long: the memory has no word; has no fewer tokens than the responses and
    observations that it stands for. copied: word for word the memory before it. unseen: share of its distinct words
    that neither the question nor any observation so far holds. memory_only: the search has a word that the memory
    holds, but neither the question nor the latest observation. early: the answer came before all facts behind it were
    seen, or up to turn 2 where they are not known.
    """
    words: Words = cache(partial(normalized_words, normalizer="unicode"))
    rows = [
        row
        for index, records in enumerate(rounds)
        for trajectory in records.trajectories
        if trajectory.status != "tool_failed"
        for row in _rows(trajectory, records.questions[trajectory.question_id], facts, words, index)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(
    trajectory: Trajectory, question: Question, facts: Mapping[str, list[Chain]], words: Words, index: int
) -> Iterator[dict[str, Any]]:
    asked = set(words(question.question))
    observations: list[str] = []
    former: list[str] | None = None
    history = 0
    for number, turn in enumerate(trajectory.turns, start=1):
        memory = words(turn.memory) if turn.memory is not None and number > 1 else None
        row: dict[str, Any] = {"round": index, "question_id": question.question_id, "turn": number, "words": memory}
        if memory is not None:
            length = turn.mem_span[1] - turn.mem_span[0] if turn.mem_span else 0
            row |= {"mem_tokens": length, "empty": not memory, "over_long": length >= history}
            row["copied"] = memory == former if memory and former else None
            shown = asked.union(*map(words, observations))
            row["unseen"] = len(set(memory) - shown) / len(set(memory)) if memory else None
        if turn.action == "search" and memory is not None:
            latest = words(observations[-1]) if observations else []
            row["memory_only"] = bool(set(words(turn.argument or "")) & set(memory) - asked - set(latest))
        if turn.action == "answer":
            row["early"] = _is_early(number, facts.get(question.question_id, []), observations)
        yield row
        former = memory
        history += len(turn.response_ids) + len(turn.observation_ids)
        observations += [turn.observation] if turn.observation else []


def _is_early(turn: int, chains: Sequence[Chain], observations: Sequence[str]) -> bool:
    if not chains:
        return turn <= EARLY_TURN
    return any(known_hops(chain, observations) < len(chain) for chain in chains)


def distinct_2(memories: Sequence[Sequence[str]]) -> float | None:
    """Distinct pairs of neighbouring words / all such pairs, over ``memories`` together; None without a pair."""
    pairs = [pair for words in memories for pair in pairwise(words)]
    return len(set(pairs)) / len(pairs) if pairs else None


def figures(rows: pd.DataFrame) -> dict[str, float]:
    """Means over the turns to which a detector applies; ``front_loaded`` is ``unseen`` of turn 2."""
    names = ("copied", "early", "empty", "over_long", "memory_only")
    found = {f"strategy/{name}": _mean(rows[name]) for name in names}
    found["strategy/front_loaded"] = _mean(rows.loc[rows["turn"] == 2, "unseen"])
    found["strategy/distinct_2"] = _mean(_diversity(rows)["distinct_2"])
    return found


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a turn with a memory or an answer, and one over all: counts and the mean of every detector.

    No row at all where nothing wrote a memory.
    """
    diversity = _diversity(rows)
    written = rows["words"].notna()
    used = rows[written | rows["early"].notna()] if written.any() else rows[:0]
    parts = [(str(turn), part) for turn, part in used.groupby("turn")] + [("all", used)] * bool(written.any())
    return pd.DataFrame(
        [
            {
                "turn": label,
                "memories": int(part["words"].notna().sum()),
                **{name: _mean(part[name]) for name in ("mem_tokens", "empty", "over_long", "copied", "unseen")},
                "distinct_2": _mean(diversity.loc[diversity["turn"].isin(part["turn"]), "distinct_2"]),
                "searches": int(part["memory_only"].notna().sum()),
                "memory_only": _mean(part["memory_only"]),
                "answers": int(part["early"].notna().sum()),
                "early": _mean(part["early"]),
            }
            for label, part in parts
        ]
    )


def _diversity(rows: pd.DataFrame) -> pd.DataFrame:
    """``distinct_2`` of the memories of each question at each turn, where it has two or more."""
    found = rows[rows["words"].notna()].groupby(["round", "question_id", "turn"])["words"]
    several = [(key[2], distinct_2(memories.tolist())) for key, memories in found if len(memories) > 1]
    return pd.DataFrame(several, columns=["turn", "distinct_2"])


def _mean(values: pd.Series[Any]) -> float:
    """NaN where no row has a value."""
    return float(values.dropna().astype(float).mean())

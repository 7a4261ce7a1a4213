"""Others' transcripts read and scored without a model (``mempo import``, docs/transcripts.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mempo import rewards, tags
from mempo.records import Status
from mempo.tags import ParsedTurn, parse_turn
from mempo.transcript_dumps import COLUMNS, Imported, reader
from mempo.transcript_file import Attempt, read_transcripts
from mempo.transcript_text import Dialect


@dataclass(frozen=True, slots=True)
class ImportedRow:
    """One transcript: the answer counts whatever the format, which has its own column. ``row`` is its place in the
    file, from 1; ``reported`` the score that stood there.
    """

    id: str
    sample_index: int
    row: int
    question: str
    num_objectives: int
    answer: str | None
    em: float
    em_mean: float
    f1: float
    format: bool
    status: Status
    turns: int
    searches: int
    memories: int
    reported: float | None


@dataclass(frozen=True, slots=True)
class Transcript:
    """A record, its score and its turns as they parse."""

    record: Imported
    row: ImportedRow
    parsed: list[ParsedTurn]


def read(
    path: Path,
    dialect: Dialect = "search-r1",
    *,
    normalizer: rewards.Normalizer = "auto",
    require_memory: bool = False,
    limit: int | None = None,
) -> list[Transcript]:
    """The first ``limit`` transcripts of ``path`` (all), scored.

    ``require_memory``: whether a turn from the second on needs a memory to be well-formed. Raises ``ValueError`` naming
    the first bad rows, each with its field.
    """
    found = []
    for attempt in read_transcripts(path, limit, columns=COLUMNS, read=reader(dialect)):
        assert isinstance(attempt.record, Imported)
        parsed = [
            parse_turn(turn.response, number, require_memory=require_memory)
            for number, turn in enumerate(attempt.record.turns, start=1)
        ]
        row = _scored(attempt, attempt.record, parsed, normalizer)
        found.append(Transcript(attempt.record, row, parsed))
    return found


def _scored(
    attempt: Attempt, record: Imported, parsed: Sequence[ParsedTurn], normalizer: rewards.Normalizer
) -> ImportedRow:
    answer = parsed[-1].argument if parsed[-1].action == "answer" else None
    score = rewards.score_answer(answer, record.golden_answers, normalizer)
    return ImportedRow(
        id=record.id,
        sample_index=attempt.sample_index,
        row=attempt.row,
        question=record.question,
        num_objectives=len(record.golden_answers),
        answer=answer,
        em=score.em,
        em_mean=score.em_mean,
        f1=score.f1,
        format=all(turn.valid for turn in parsed),
        status=_status(record.turns[-1].response, parsed[-1]),
        turns=len(parsed),
        searches=sum(turn.action == "search" for turn in parsed),
        memories=sum(turn.memory is not None for turn in parsed),
        reported=record.reported,
    )


def _status(response: str, parsed: ParsedTurn) -> Status:
    """How a transcript ends: with an answer; with a search after which nothing was written; with a tag that opens and
    does not close; or with neither.
    """
    if parsed.action is not None:
        return "answered" if parsed.action == "answer" else "max_turns"
    found = tags.TAG.findall(response)
    return "truncated" if found and not found[-1].startswith("</") else "no_action"

"""Anyone's trajectories out of a JSONL or Parquet file, checked: an error names the row and the field."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from mempo import arrow
from mempo.transcripts import ChatTranscript, TextTranscript, TokenTranscript, Transcript

MAX_LINE = 2**26  # bytes of a JSONL line
MAX_TOLD = 10  # bad rows that an error names
COLUMNS = ("id", "question", "golden_answers", "sample_index", "turns", "messages", "prompt_ids")

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checked record and where it stands: ``row`` counts from 1 (lines of JSONL, rows of Parquet)."""

    row: int
    sample_index: int
    record: Transcript


class Problems:
    """What is wrong with which row, told together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: dict[int, str] = {}

    def add(self, row: int, text: str) -> None:
        self.told.setdefault(row, text)

    def stop(self) -> None:
        """Raise ``ValueError`` naming the first bad rows, where there is one."""
        if self.told:
            unit = "line" if self.path.suffix == ".jsonl" else "row"
            lines = [f"{self.path}, {unit} {row}: {text}" for row, text in sorted(self.told.items())[:MAX_TOLD]]
            more = len(self.told) - len(lines)
            raise ValueError("\n".join([*lines, f"and {more} more bad {unit}s"] if more else lines))


def record_of(row: Mapping[str, Any]) -> Transcript:
    """A row of docs/score.md. Raises ``ValueError`` naming what is wrong with it."""
    return validated(_form(row), row)


def read_transcripts(
    path: Path,
    limit: int | None = None,
    *,
    columns: Sequence[str] = COLUMNS,
    read: Callable[[dict[str, Any]], Transcript] = record_of,
) -> list[Attempt]:
    """The first ``limit`` records of ``path`` (all). Rows of one ``id`` are samples of one question.

    ``read`` makes a record of a row without nulls, or raises ``ValueError``; ``columns``: those it looks at.

    Raises ``ValueError`` naming the first bad rows, each with its field, or why the file holds no record.
    """
    problems, attempts = Problems(path), []
    samples: dict[str, dict[int, Attempt]] = {}
    for number, parsed in islice(_rows(path, columns), limit):
        try:
            record = read(_whole(parsed()))
            of_question = samples.setdefault(record.id, {})
            sample_index = len(of_question) if record.sample_index is None else record.sample_index
            attempt = Attempt(number, sample_index, record)
            _refuse_mixed_up(attempt, of_question)
        except ValueError as error:
            problems.add(number, str(error))
            continue
        of_question[sample_index] = attempt
        attempts.append(attempt)
    problems.stop()
    if not attempts:
        raise ValueError(f"{path}: no trajectory in it")
    return attempts


def validated(model: type[M], values: Mapping[str, Any]) -> M:
    """Raises ``ValueError`` naming the first fields that are wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [_explain(dict(problem)) for problem in error.errors(include_url=False)]
        raise ValueError("; ".join(problems[:3])) from None


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Callable[[], Any]]]:
    """(number from 1, what reads the row or raises ``ValueError``) for each row."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".parquet":
        return enumerate(arrow.read_rows(path, columns), start=1)
    if path.suffix == ".jsonl":
        return _lines(path)
    raise ValueError(f"{path}: expected a file that ends in .jsonl or .parquet")


def _lines(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    with path.open("rb") as file:
        # No line is read further than a byte past the limit; what remains of it would be more lines of rubbish.
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
            if len(line) > MAX_LINE:
                raise ValueError(f"{path}, line {number}: longer than {MAX_LINE} bytes")
            if line.strip():
                yield number, partial(_parse, line)


def _parse(line: bytes) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(line.decode("utf-8-sig").strip(), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        said = str(error)
        if isinstance(error, json.JSONDecodeError):  # whose own "line 1" would be taken for the file's
            said = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        cut = "" if line.endswith(b"\n") else " (the file ends here: was it cut off?)"
        raise ValueError(f"not whole JSON: {said}{cut}") from None


def _whole(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with id, question and golden_answers, found {type(row).__name__}")
    given: dict[str, Any] = _given(row)
    return given


def _given(value: Any, depth: int = 0) -> Any:
    """``value`` without keys that are null: a Parquet row has every column of its file."""
    if depth > 8:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {key: _given(entry, depth + 1) for key, entry in value.items() if entry is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_given(entry, depth + 1) for entry in value]
    return value


def _form(row: Mapping[str, Any]) -> type[Transcript]:
    if "messages" in row and ("turns" in row or "prompt_ids" in row):
        raise ValueError("messages: a record has messages, or turns, or prompt_ids with turns; not two of them")
    if "messages" in row:
        return ChatTranscript
    if "prompt_ids" in row:
        return TokenTranscript
    if "turns" in row:
        return TextTranscript
    raise ValueError("turns: missing; a record has turns, or messages, or prompt_ids with turns of token ids")


def _explain(problem: dict[str, Any]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]]
    name = "".join(parts).removeprefix(".")
    if problem["type"] == "missing":
        return f"{name}: missing"
    if problem["type"] == "extra_forbidden":
        return f"{name}: unknown key"
    if problem["type"] == "value_error":
        return ": ".join(filter(None, [name, str(problem["ctx"]["error"])]))
    return f"{name}: {problem['msg']}, got {reprlib.repr(problem['input'])}"


def _refuse_mixed_up(attempt: Attempt, of_question: Mapping[int, Attempt]) -> None:
    record = attempt.record
    for other in of_question.values():
        for field in ("question", "golden_answers"):
            if getattr(record, field) != getattr(other.record, field):
                raise ValueError(f"{field}: another than in {other.row}, which has the same id {record.id!r}")
        break
    if attempt.sample_index in of_question:
        twin = of_question[attempt.sample_index].row
        raise ValueError(f"sample_index: {attempt.sample_index} of id {record.id!r} is in {twin} already")

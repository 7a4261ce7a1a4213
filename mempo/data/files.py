"""Rows of anybody's files, one at a time: a JSON array, JSON lines, Parquet. From a local path or from the Hub.

A row that cannot be read is an ``Unreadable`` in its place; a file that is cut off or is of none of these kinds raises
``ValueError`` with its name and the place.
"""

from __future__ import annotations

import io
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from mempo import arrow

MAX_ROW_BYTES = 1 << 24
EXCERPT_CHARS = 160
_CHUNK = 1 << 20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")
_END = object()
_HUB = re.compile(r"hf://datasets/(?P<repo_id>[\w.-]+/[\w.-]+?)(@(?P<revision>[^/\s]+))?/(?P<filename>[^\s]+)")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class Unreadable:
    reason: str
    excerpt: str = ""


def local_file(path: str) -> Path:
    """``path`` itself, or where the Hub's file ``hf://datasets/OWNER/NAME@REVISION/PATH`` lies after its download."""
    if not path.startswith("hf://"):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file")
        return Path(path)
    parts = _HUB.fullmatch(path)
    if parts is None:
        raise ValueError(f"{path}: expected hf://datasets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME@REVISION/PATH")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = hf_hub_download(parts["repo_id"], parts["filename"], repo_type="dataset", revision=parts["revision"])
    except LocalEntryNotFoundError:
        raise ValueError(f"{path}: not in the cache, and the Hub does not answer, or HF_HUB_OFFLINE is set") from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    return Path(found)


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Each row as plain Python; of a Parquet file only ``columns``."""
    with path.open("rb") as file:
        beginning = file.read(1 << 16)
        start = beginning.removeprefix(BOM_UTF8).lstrip()[:4]
        file.seek(len(BOM_UTF8) if beginning.startswith(BOM_UTF8) else 0)
        if start == b"PAR1":
            yield from _parquet_rows(path, columns)
        elif start[:1] == b"[":
            yield from _array_rows(path, file)
        else:
            yield from _line_rows(path, file)


def excerpt(row: Any) -> str:
    """The beginning of a row, for people."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str)[:EXCERPT_CHARS]
    except (RecursionError, ValueError):
        return ""


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    for read in arrow.read_rows(path, columns):
        try:
            yield read()
        except ValueError as error:
            yield Unreadable(str(error))


def _array_rows(path: Path, file: IO[bytes]) -> Iterator[Any]:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    buffer = _chunk(text, str(path)).lstrip()
    at, passed, number = 0, 0, 1  # ``buffer`` is the text from character ``passed`` on, of which ``at`` are read
    while True:
        try:
            row, end = _row_at(buffer, at)
        except json.JSONDecodeError as error:
            place = f"{path}, row {number}, character {passed + error.pos + 1}"
            chunk = _chunk(text, place)
            if not chunk or len(buffer) - at > MAX_ROW_BYTES:
                raise ValueError(f"{place}: not whole JSON: {error.msg}") from None
            buffer, at, passed = buffer[at:] + chunk, 0, passed + at
            continue
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, row {number}: not readable: {error}") from None
        if row is _END:
            if (buffer[end:] + _chunk(text, str(path))).strip():
                raise ValueError(f"{path}: text after the end of the array, at character {passed + end + 1}")
            return
        yield row
        number, at = number + 1, end


def _row_at(buffer: str, at: int) -> tuple[Any, int]:
    """The row after the mark at ``at``, and the place of the next mark; ``_END`` and what comes then at the last."""
    mark, start = buffer[at : at + 1], _after_space(buffer, at + 1)
    if mark == "]":
        return _END, start
    if mark == "[" and buffer[start : start + 1] == "]":
        return _END, start + 1
    row, end = _DECODER.raw_decode(buffer, start)
    end = _after_space(buffer, end)
    if buffer[end : end + 1] not in {",", "]"}:
        raise json.JSONDecodeError("Expecting ',' or ']'", buffer, end)
    return row, end


def _after_space(buffer: str, at: int) -> int:
    match = _SPACE.match(buffer, at)
    return match.end() if match else at


def _chunk(text: io.TextIOWrapper, place: str) -> str:
    try:
        return text.read(_CHUNK)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}, or soon after: not UTF-8: {error.reason}") from None


def _line_rows(path: Path, file: IO[bytes]) -> Iterator[Any]:
    # Bytes, for a text line may end at other marks than "\n" (U+0085, U+2028) that a question is free to hold.
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise ValueError(f"{path}, line {number}: longer than {MAX_ROW_BYTES} bytes")
        if not line.strip():
            continue
        row = _parsed(line)
        if isinstance(row, Unreadable) and not line.endswith(b"\n"):
            raise ValueError(f"{path}, line {number}: the file is cut off: {row.reason}")
        yield row


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg}"
    except (ValueError, RecursionError) as error:
        reason = f"not readable: {error}"
    return Unreadable(reason, line[:EXCERPT_CHARS].decode(errors="replace").rstrip())

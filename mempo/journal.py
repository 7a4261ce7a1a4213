"""A run's log: ``log.jsonl`` in its folder, one JSON object a line, from every process that works on the run.

Whatever ``logging.getLogger(__name__)`` of this project says while the run is open lands there. Passwords in URLs are
hidden and a message is cut: the log is for errors, not for what a model wrote.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

FILE = "log.jsonl"
MAX_MESSAGE = 400  # characters
TAIL = 64 * 1024  # bytes of a log that ``last`` looks at
_OURS = ("mempo", "tasks", "flows")
_PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]*@")
_fields: ContextVar[Mapping[str, Any]] = ContextVar("fields of a log line", default=MappingProxyType({}))

log = logging.getLogger(__name__)


def hidden(text: str) -> str:
    """``text`` without the passwords of its URLs: ``x://me:***@host``."""
    return _PASSWORD_IN_URL.sub(r"\1:***@", text)


def told(error: BaseException) -> str:
    """An error in one line, without passwords."""
    return hidden(": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0]))))


@contextmanager
def within(**fields: Any) -> Iterator[None]:
    """Lines that are logged inside carry ``fields``, such as the round."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


@contextmanager
def kept(folder: Path, run: str, task: str = "run", **fields: Any) -> Iterator[None]:
    """What is logged inside goes to ``folder/log.jsonl``, from a line that the run begins to one of how it ended."""
    handler = _Lines(folder / FILE)
    loggers = [logging.getLogger(name) for name in _OURS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        with within(run=run), timed(task, **fields):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


@contextmanager
def timed(task: str, **fields: Any) -> Iterator[None]:
    """Log the end of ``task`` with its seconds, or its error in one line: of a step a WARNING, it may be retried."""
    with within(task=task, **fields):
        began = time.monotonic()
        if task == "run":
            log.info("begins")
        try:
            yield
        except BaseException as error:
            level = logging.ERROR if task == "run" else logging.WARNING
            log.log(level, "failed: %s", told(error), extra={"seconds": round(time.monotonic() - began, 3)})
            raise
        log.info("done", extra={"seconds": round(time.monotonic() - began, 3)})


def last(folder: Path, count: int, *, level: int = logging.INFO) -> list[dict[str, Any]]:
    """The last ``count`` lines of at least ``level``, oldest first; what a killed writer left half is skipped."""
    try:
        with (folder / FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and _level(entry) >= level:
                found.append(entry)
    return found[-count:]


def _level(entry: Mapping[str, Any]) -> int:
    return logging.getLevelNamesMapping().get(str(entry.get("level")), logging.INFO)


class _Lines(logging.Handler):
    """Each line is one write to a file that is open for appending: lines of several processes do not mix."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a full disk stops the run where it writes results
            path = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                with suppress(OSError):  # of a file system without locks
                    fcntl.flock(path, fcntl.LOCK_EX)  # or a line that another process is writing would look half
                # Begun by a writer that was killed or had no room: its half line stays one line.
                size = os.fstat(path).st_size
                whole = not size or os.pread(path, 1, size - 1) == b"\n"
                os.write(path, (b"" if whole else b"\n") + _line(record))
            finally:
                os.close(path)


def _line(record: logging.LogRecord) -> bytes:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    about = {"time": at, "level": record.levelname, "process": os.getpid(), "host": socket.gethostname()}
    measured = {name: vars(record)[name] for name in ("seconds", "figures") if name in vars(record)}
    message = hidden(record.getMessage())[:MAX_MESSAGE]
    return (json.dumps(about | dict(_fields.get()) | {"message": message} | measured, default=str) + "\n").encode()

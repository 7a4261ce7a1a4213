"""A folder through which one process commands several.

Command n is ``n.<name>.parquet`` of samples, then ``n.json``; all ranks read it, rank 0 writes ``n.reply.json``. JSON
is written beside its place and renamed: what is there is whole. Nothing is flushed to the disk: a crash ends it all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempo import arrow, storage
from mempo.records import Sample

POLL_S = 0.002
# What a reply may raise in the process that asked.
ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in (ValueError, FloatingPointError, OSError)}


@dataclass(frozen=True, slots=True)
class Mailbox:
    folder: Path

    def ask(self, number: int, call: str, samples: Mapping[str, Sequence[Sample]], **options: Any) -> None:
        """Write command ``number``: ``call(*samples, **options)``."""
        for name, part in samples.items():
            arrow.write_parquet(self.folder / f"{number}.{name}.parquet", part)
        _put(self._command(number), {"call": call, "samples": list(samples), "options": options})

    def read(self, number: int) -> tuple[str, list[list[Sample]], dict[str, Any]]:
        """(call, samples, options), once they are there."""
        _wait(self._command(number), lambda: None)
        command = storage.read_json(self._command(number))
        files = [self.folder / f"{number}.{name}.parquet" for name in command["samples"]]
        return command["call"], [storage.read_records(file, Sample) for file in files], command["options"]

    def answer(self, number: int, result: Mapping[str, float]) -> None:
        # As text, since JSON has no infinity.
        _put(self._reply(number), {"result": {name: repr(value) for name, value in result.items()}})

    def refuse(self, number: int, error: Exception) -> None:
        """Answer with one of ``ERRORS`` or a subclass."""
        kind = next(name for name, known in ERRORS.items() if isinstance(error, known))
        _put(self._reply(number), {"error": kind, "message": str(error)})

    def reply(self, number: int, check: Callable[[], None]) -> dict[str, float]:
        """The answer to command ``number``, which then goes; ``check`` raises where none can come any more."""
        _wait(self._reply(number), check)
        reply = storage.read_json(self._reply(number))
        for file in self.folder.glob(f"{number}.*"):
            file.unlink()
        if "error" in reply:
            raise ERRORS[reply["error"]](reply["message"])
        return {name: float(value) for name, value in reply["result"].items()}

    def _command(self, number: int) -> Path:
        return self.folder / f"{number}.json"

    def _reply(self, number: int) -> Path:
        return self.folder / f"{number}.reply.json"


def _put(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)


def _wait(path: Path, check: Callable[[], None]) -> None:
    while not path.exists():
        time.sleep(POLL_S)
        try:
            check()
        except RuntimeError:
            if not path.exists():  # the last word of the dead counts
                raise

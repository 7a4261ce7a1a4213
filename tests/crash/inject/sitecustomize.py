"""Python imports this at its start where the folder is on PYTHONPATH: a command then dies, or its disk is full, at a
change of a file below CRASH_ROOT. Python's audit events tell of them, so nothing of the product is replaced.

A point is a change of a file, and how many rounds were finished then. CRASH_SEEN is a file with the points that were
chosen before; the first other one in which CRASH_AT, a regular expression, is found is added and chosen. CRASH_DO:
``kill`` ends the process right before that change, ``full`` lets it and every later one fail. CRASH_PART: ``k/n``, the
k-th n-th of all points, by a hash.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import zlib
from errno import ENOSPC
from pathlib import Path
from typing import Any

ROOT = os.environ.get("CRASH_ROOT")
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
NEED_ROOM = {"write", "flush", "os.mkdir", "os.rename"}


class Watch:
    def __init__(self, seen: Path, do: str, at: str, part: str) -> None:
        self._seen, self._do, self._at = seen, do, re.compile(at)
        self._part, self._parts = map(int, part.split("/"))
        self._full = self._busy = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or self._busy or not str(arguments[0]).startswith(f"{ROOT}/"):
            return
        if event == "open":
            mode, flags = arguments[1:]
            if mode is not None and not flags & (os.O_WRONLY | os.O_RDWR):
                return  # to read
            event = "flush" if mode is None else "write"  # whole_file and whole_folder flush what os.open gives
        if self._do == "full" and event not in NEED_ROOM:
            return
        self._busy = True
        self._full = self._full or self._chosen(event, str(arguments[0]))
        self._busy = False
        if self._full:
            if self._do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(arguments[0]))

    def _chosen(self, event: str, path: str) -> bool:
        rounds = len(list(Path(ROOT).glob("runs/*/round_*/log.json")))
        named = re.sub(r"\.[0-9a-f]{12}\.tmp", ".tmp", path.removeprefix(f"{ROOT}/"))
        point = f"round {rounds}, before {event.removeprefix('os.')} {named}"
        if not self._at.search(point) or zlib.crc32(point.encode()) % self._parts != self._part:
            return False
        if self._seen.exists() and point in self._seen.read_text().splitlines():
            return False
        with self._seen.open("a") as file:
            file.write(f"{point}\n")
        return True


if "CRASH_DO" in os.environ and "mempo.cli" in sys.orig_argv:
    seen, do, at, part = (os.environ[f"CRASH_{name}"] for name in ("SEEN", "DO", "AT", "PART"))
    sys.addaudithook(Watch(Path(seen), do, at, part))

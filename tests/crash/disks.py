"""Disks that are full or read-only for real: a small file system of their own, for which mounting must be allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crash.experiment import Experiment, Training
from tests.crash.kinds import one_line
from tests.crash.table import Table

SIZE_KB = 16 * 1024


def disk(experiment: Experiment, table: Table) -> None:
    """Full with so much room left, read-only, and well again."""
    place = experiment.home / "disk"
    try:
        with mounted(place):
            training = Training(experiment, "disk", below=place)
            for room_kb in (0, 40, 400, 1200):
                with filled(place, room_kb):
                    code = training.run()
                _refused(table, training, code, "disk full", f"{room_kb} KiB left", "No space left on device")
            assert training.run(CRASH_DO="kill", CRASH_AT=r"round_0001/\.scores\.parquet") < 0
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
            code = training.run()
            _refused(table, training, code, "disk read-only", "in round 1", "Read-only file system")
            subprocess.run(["mount", "-o", "remount,rw", place], check=True)
            table.ended("disk full, then read-only", training.run(), training)
    except PermissionError as error:
        print(f"left out: {error}", flush=True)


def _refused(table: Table, training: Training, code: int, what: str, when: str, reason: str) -> None:
    wrong = [f"exit code {code}"] if code != 1 else [*one_line(training, reason), *training.so_far()]
    table.kill(what, when, wrong)


@contextmanager
def mounted(place: Path) -> Iterator[None]:
    """A file system of ``SIZE_KB`` in memory. Raises ``PermissionError`` where this process may not mount."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KB}k", "tmpfs", place]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"full and read-only disks: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def filled(place: Path, room_kb: int) -> Iterator[None]:
    """Leave ``room_kb`` of the file system that is mounted there."""
    filler = place / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass
    except OSError:
        size = filler.stat().st_size
        with filler.open("r+b") as file:
            file.truncate(max(0, size - room_kb * 1024))
    yield
    filler.unlink()

"""Progress of long work: a bar on a terminal, a line every ten seconds anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False)
_EVERY_S = 10.0

Advance = Callable[..., None]


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """Yields ``advance(done, **figures)``: how many of ``total`` are done, and figures worth showing beside it."""
    if not console.is_terminal:
        yield _printer(label, total)
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda done, **figures: bar.update(task, completed=done, note=_note(figures))


def _printer(label: str, total: int) -> Advance:
    started = last = time.monotonic()

    def advance(done: int, **figures: float) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= _EVERY_S:
            last = now
            print(
                f"{label}: {done}/{total} in {now - started:.0f} s {_note(figures)}".rstrip(),
                file=sys.stderr,
                flush=True,
            )

    return advance


def _note(figures: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in figures.items())

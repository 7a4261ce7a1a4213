"""Two things measured in one run, in turns, so that a busy machine is busy for both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
Clock = Callable[[], float]


def timed(action: Callable[[], Result], clock: Clock = time.process_time) -> tuple[float, Result]:
    """Seconds of one call, and what it gave. The clock counts CPU-seconds of this process, all threads."""
    started = clock()
    result = action()
    return clock() - started, result


def side_by_side(*actions: Callable[[], object], repeats: int = 3, clock: Clock = time.process_time) -> list[float]:
    """Seconds of the fastest call of each, after one of each that does not count."""
    for action in actions:
        action()
    found = [[timed(action, clock)[0] for action in actions] for _ in range(repeats)]
    return [min(times) for times in zip(*found, strict=True)]

"""Two things measured in one run, in turns, so that a busy machine is busy for both."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_seconds(action: Callable[[], object]) -> float:
    """Of this process, all threads."""
    started = time.process_time()
    action()
    return time.process_time() - started


def side_by_side(*actions: Callable[[], object], repeats: int = 3) -> list[float]:
    """CPU-seconds of the fastest call of each, after one of each that does not count."""
    for action in actions:
        action()
    found = [[cpu_seconds(action) for action in actions] for _ in range(repeats)]
    return [min(times) for times in zip(*found, strict=True)]

"""Sub-flows in processes of their own: one that is killed takes no other with it, and all end with their parent."""

from __future__ import annotations

import time
from multiprocessing.context import SpawnProcess
from threading import Event
from typing import Any

from prefect.flow_engine import run_flow_in_subprocess

GRACE_S = 10.0
# Of this process. They stand in a module, since Prefect pickles what a flow or its arguments hold.
_running: set[SpawnProcess] = set()
_stopped = Event()


def run(flow: Any, parameters: dict[str, Any]) -> int:
    """The exit code of ``flow(**parameters)``, run as a sub-flow of the caller's; 0 where it completed.

    Called from a thread. Raises ``RuntimeError`` once ``stop`` was called.
    """
    if _stopped.is_set():
        raise RuntimeError("stopped before it began")
    process = run_flow_in_subprocess(flow, parameters=parameters)
    _running.add(process)
    process.join()
    _running.discard(process)
    return process.exitcode or 0


def stop() -> None:
    """End what runs, and let nothing begin any more. What does not end by itself in ``GRACE_S`` is killed."""
    _stopped.set()
    left = list(_running)
    for process in left:
        process.terminate()
    until = time.monotonic() + GRACE_S
    for process in left:
        # A signal that comes while Python tidies up is an exception that nobody sees.
        process.join(max(0.0, until - time.monotonic()))
        process.kill()

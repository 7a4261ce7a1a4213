"""Servers that training must not wait for: MLflow's pages and Prefect's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event, Thread

from mempo import journal

WAIT_S = 5.0
PAUSE = 20  # times as long as a failed job took, nothing is tried

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Patience:
    """Jobs for one server, one at a time and in their order. The caller waits for a job ``WAIT_S`` at most.

    A job that takes longer goes on in its thread. One that fails is a warning and a pause, so that a server that is
    away is asked 5 % of the time. Neither is an error.
    """

    server: str
    silent_until: float = 0.0
    working: Thread | None = None

    def attempt(self, job: Callable[[], object], wait_s: float = WAIT_S) -> bool:
        """Whether ``job`` was done when its caller went on; False also where the former one is not, or in a pause."""
        until = time.monotonic() + wait_s
        if self.working is not None:
            self.working.join(wait_s)
        if time.monotonic() < self.silent_until or (self.working is not None and self.working.is_alive()):
            return False
        done = Event()
        self.working = Thread(target=copy_context().run, args=(self._do, job, done), daemon=True)
        self.working.start()
        self.working.join(max(0.0, until - time.monotonic()))
        if self.working.is_alive():
            log.warning("%s: no answer within %.0f s; training goes on", self.server, wait_s)
        return done.is_set()

    def _do(self, job: Callable[[], object], done: Event) -> None:
        began = time.monotonic()
        try:
            job()
        except Exception as error:  # whatever a server, a network or a disk raises: training goes on
            now = time.monotonic()
            self.silent_until = now + PAUSE * (now - began)
            log.warning("%s: %s; training goes on", self.server, journal.told(error))
        else:
            done.set()

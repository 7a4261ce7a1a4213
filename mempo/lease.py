"""A lock with an owner and a lease, for processes of one host or of several that share a store.

The lock's file names its owner and counts beats. A waiter takes over where the beat has stood still for a lease by the
waiter's own steady clock, so that no two clocks are compared, and at once where the owner was a process of this host.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from pydantic import BaseModel, ConfigDict, ValidationError

from mempo.console import console
from mempo.store import Store

POLL_S = 0.25
PAUSE_S = 1.0  # from one's own take-over to the look whether another waiter's came after it


class Owner(BaseModel):
    """``machine``: this boot of this kernel and its process ids, empty where they are not to be had; ``started``: when
    the process began, in clock ticks from the boot, which no step of a wall clock moves.
    """

    model_config = ConfigDict(frozen=True)

    token: str
    beat: int
    host: str
    machine: str
    pid: int
    started: str
    flow_run: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (flow run {self.flow_run})" if self.flow_run else "")

    def has_ended(self) -> bool:
        """Whether it was a process of this host that is no more; False for all others."""
        return bool(self.machine) and self.machine == machine() and self.started != started(self.pid)


@contextmanager
def held(store: Store, name: str, lease_s: float, *, what: str) -> Iterator[None]:
    """Waits for the lock ``name``, telling once for whom; renews it every third of ``lease_s``, lets go at the end.

    A process that loses it, to another owner or because the store was away for ``lease_s``, ends itself by SIGTERM.
    """
    lock = _Lock(store, name, lease_s, what)
    lock.acquire()
    over = Event()
    renewal = Thread(target=lock.renew_until, args=(over,), name=f"lease of {name}", daemon=True)
    renewal.start()
    try:
        yield
    finally:
        over.set()
        renewal.join()
        lock.release()


@dataclass(slots=True)
class _Lock:
    store: Store
    name: str
    lease_s: float
    what: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    beat: int = 0

    def acquire(self) -> None:
        seen, told = b"", False
        since = answered = time.monotonic()
        while True:
            try:
                found = self.store.read(self.name)
                answered = time.monotonic()
            except OSError:
                if time.monotonic() - answered > self.lease_s:
                    raise
                since = time.monotonic()  # a beat that nobody could look at has not stood still
                time.sleep(POLL_S)
                continue
            if found is None:
                if self.store.create(self.name, self._signed()):
                    return
                continue
            if found != seen:
                seen, since = found, answered
            owner = _parsed(found)
            if owner and owner.token == self.token:  # a create that was sent twice
                return
            if (owner and owner.has_ended()) or answered - since > self.lease_s:
                if self._take_over(found):
                    return
                continue
            if not told:
                told = True
                console.print(f"waiting for {owner or 'another process'}, which works on {self.what}")
            time.sleep(POLL_S)

    def renew_until(self, over: Event) -> None:
        renewed = time.monotonic()
        while not over.wait(self.lease_s / 3):
            try:
                found = self.store.read(self.name)
                owner = _parsed(found) if found is not None else None
                if found is None:  # somebody cleaned up
                    self.store.create(self.name, self._signed())
                elif owner and owner.token == self.token:
                    self.store.write(self.name, self._signed())
                else:
                    return self._lost(f"{owner or 'another process'} has taken it over")
            except OSError as error:
                if time.monotonic() - renewed > self.lease_s:
                    return self._lost(f"not renewed for {self.lease_s:g} s: {error}")
                continue
            renewed = time.monotonic()

    def release(self) -> None:
        with suppress(OSError):  # what cannot be removed lapses
            if self._is_ours():
                self.store.remove(self.name)

    def _take_over(self, found: bytes) -> bool:
        """Raises ``OSError`` where the store refuses the write. The slower of two writers fails on a local path too."""
        refused: OSError | None = None
        try:
            self.store.write(self.name, self._signed())
        except OSError as error:
            refused = error
        time.sleep(PAUSE_S)
        if refused and self.store.read(self.name) == found:
            raise refused
        return self._is_ours()

    def _is_ours(self) -> bool:
        found = owner(self.store, self.name)
        return found is not None and found.token == self.token

    def _signed(self) -> bytes:
        self.beat += 1
        pid = os.getpid()
        owner = Owner(
            token=self.token,
            beat=self.beat,
            host=socket.gethostname(),
            machine=machine(),
            pid=pid,
            started=started(pid),
            flow_run=os.environ.get("PREFECT__FLOW_RUN_ID", ""),
        )
        return owner.model_dump_json(indent=2).encode()

    def _lost(self, why: str) -> None:
        console.print(f"the lock on {self.what} is lost: {why}; this process ends")
        os.kill(os.getpid(), signal.SIGTERM)


def owner(store: Store, name: str) -> Owner | None:
    """Who holds the lock; None where nobody does, or nobody knows. Raises ``OSError`` where the store is away."""
    found = store.read(name)
    return _parsed(found) if found is not None else None


def _parsed(found: bytes) -> Owner | None:
    """None for what no owner wrote, or has begun to write: then the lease alone decides."""
    try:
        return Owner.model_validate_json(found)
    except ValidationError:
        return None


def machine() -> str:
    """This boot of this kernel and its process ids; empty where they are not to be had."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """When a process began, in ticks from the boot; empty where no such process lives, or there is no /proc.

    Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]

"""Detached services of one state folder: started once behind a file lock, known by pid and start time, stopped exactly.

``services.json`` is written before a service is ready: one whose starter was killed is found, waited for or stopped.
What a service starts has its mark in the environment, and is stopped with it even where the service has died.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from mempo import family

DEADLINE_S = 120.0
PORT = "{port}"  # stands for the port in a command and its environment

Say = Callable[[str], None]


class ServiceError(RuntimeError):
    """A message for the user: what did not start, or ended, or is not what it should be, and where its log is."""


@dataclass(frozen=True, slots=True)
class Service:
    """What answers ``health`` on 127.0.0.1: a server, or a worker.

    ``started`` is its process's creation time: a recycled pid has another one.
    """

    name: str
    pid: int
    port: int
    started: float
    health: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def process(self) -> psutil.Process | None:
        """The very process that was started, or None where it has ended."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None


@contextmanager
def locked(state: Path, name: str, *, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """One process at a time; a killed holder lets go. Raises ``ServiceError`` after ``deadline_s`` of waiting."""
    path = state / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ServiceError(f"{path}: held by another process for more than {deadline_s:.0f} s") from None
                time.sleep(0.1)
        yield


def ensure(
    state: Path,
    name: str,
    command: Sequence[str],
    health: str,
    preferred_port: int,
    *,
    say: Say,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
) -> Service:
    """The service ``name`` that runs, or ``python -m <command>`` started now; it answers on return.

    ``PORT`` in ``command`` and in the additional ``environment`` becomes the port. Raises ``ServiceError`` with the
    log's path where it ends, or does not answer within ``deadline_s``.
    """
    log = state / "logs" / f"{name}.log"
    give_up = time.monotonic() + deadline_s
    with locked(state, "services", deadline_s=deadline_s):
        for attempt in range(3):
            service = alive(state).get(name)
            if service is None:
                # From the second attempt on any port: another program was faster on the preferred one.
                former = recorded(state).get(name)  # whoever knew it finds it again
                port = free_port(0 if attempt else former.port if former else preferred_port)
                if not former and preferred_port and port != preferred_port:
                    say(f"{name}: port {preferred_port} is taken by another program")
                service = _spawn(state, name, command, environment or {}, health, port)
                _write(state, recorded(state) | {name: service})
            if _wait(service, give_up, say):
                return service
            if process := service.process():
                family.end(process)
                raise ServiceError(f"{name} did not answer within {deadline_s:.0f} s; its log: {log}")
    raise ServiceError(f"{name} ended as it started; its log: {log}")


def stop(state: Path, *names: str) -> list[str]:
    """End exactly the services that were started from ``state``, or the named ones, the last first; a line on each."""
    if not _file(state).exists():
        return []
    done = []
    with locked(state, "services"):
        for service in reversed([found for name, found in recorded(state).items() if not names or name in names]):
            process = service.process()
            family.end(*family.marked(f"{state.resolve()}:{service.name}"), *([process] if process else []))
            if process:
                done.append(f"stopped {service.name} (pid {service.pid}, port {service.port})")
            else:
                done.append(f"{service.name} (pid {service.pid}) had ended already")
        if not names:
            _file(state).unlink(missing_ok=True)
    return done


def recorded(state: Path) -> dict[str, Service]:
    """What was started from here. Raises ``ServiceError`` where the record is damaged: nobody would end them."""
    try:
        return {name: Service(**value) for name, value in json.loads(_file(state).read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ServiceError(f"{_file(state)}: damaged ({error}); end its servers by hand, then delete it") from None


def alive(state: Path) -> dict[str, Service]:
    return {name: service for name, service in recorded(state).items() if service.process()}


def free_port(preferred: int) -> int:
    """``preferred`` where nothing listens on it, else (or for 0) one that the system gives."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServiceError("no free port on 127.0.0.1")


def _spawn(
    state: Path, name: str, command: Sequence[str], environment: Mapping[str, str], health: str, port: int
) -> Service:
    log = state / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-m", *(word.replace(PORT, str(port)) for word in command)]
    own = {key: value.replace(PORT, str(port)) for key, value in environment.items()} | family.mark(
        f"{state.resolve()}:{name}"
    )
    with log.open("ab") as output:
        # A session of its own: Ctrl-C ends the program at once and leaves the server to record how the run ended.
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        child = subprocess.Popen(arguments, cwd=log.parent, env=os.environ | own, start_new_session=True, **streams)
    return Service(name, child.pid, port, psutil.Process(child.pid).create_time(), health)


def _wait(service: Service, give_up: float, say: Say) -> bool:
    """True once the server answers; False where it has ended or ``give_up`` has come."""
    began, waited = time.monotonic(), 0.0
    while (process := service.process()) and time.monotonic() < give_up:
        if family.listens(process, service.port) and _healthy(service):
            if waited:
                say(f"{service.name} ready at {service.url} after {waited:.0f} s")
            return True
        waited = time.monotonic() - began
        say(f"starting {service.name} ... {waited:.0f} s")
        time.sleep(0.3)
    return False


def _healthy(service: Service) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=2)
    try:
        connection.request("GET", service.health)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _file(state: Path) -> Path:
    return state / "services.json"


def _write(state: Path, services: dict[str, Service]) -> None:
    whole = _file(state).with_suffix(".tmp")
    whole.write_text(json.dumps({name: asdict(service) for name, service in services.items()}, indent=2))
    os.replace(whole, _file(state))

"""vLLM servers of one policy on this machine: started, watched, started again, ended with this program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from mempo import family, lora, vllm_program as program
from mempo.engines import loader
from mempo.runtime import Runtime
from mempo.services import Say, ServiceError

MAX_RESTARTS = 5
LONGEST_PAUSE_S = 30.0  # before a restart: 1, 2, 4 .. s
PATIENCE_S = 20.0  # for a server to end by itself
LOG_LINES = 15
POLL_S = 0.3


@dataclass(slots=True)
class Child:
    """One server: how it is started, and what became of it."""

    url: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    restarts: int = 0
    again: float = 0.0  # when to start it, of time.monotonic


def serve(
    policy: Path, runtime: Runtime, logs: Path, *, count: int, host: str, port: int, say: Say, stop: threading.Event
) -> None:
    """Keep ``count`` servers up, on ``port`` and the ports after it, until ``stop``. Returns when all have ended.

    Raises ``ServiceError`` with the end of the log where one does not start, or has died more than five times, and
    ``ValueError`` where ports or GPUs are missing.
    """
    _enough_gpus(runtime, count)
    for index in range(count):
        _free(host, port + index)
    window = loader.context_window(loader.load_outline(policy))
    model = lora.base_of(policy).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    children = [
        Child(
            url=f"http://{_shown(host)}:{port + index}",
            command=program.command(model, runtime, window=window, host=host, port=port + index),
            environment=program.environment(runtime, index, os.environ),
            log=logs / f"vllm-{port + index}.log",
        )
        for index in range(count)
    ]
    told = False
    try:
        while not stop.is_set():
            for child in children:
                _look_after(child, say)
            if not told and all(child.ready for child in children):
                told = True
                urls = ", ".join(child.url for child in children)
                say(f"ready: --set runtime.engine=vllm --set 'runtime.vllm.servers=[{urls}]'")
            stop.wait(POLL_S)
    finally:
        end([child.process for child in children if child.process])


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End servers with all that they started; what has not ended in ``PATIENCE_S`` is killed."""
    leaders = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            leaders.append(psutil.Process(process.pid))
    family.end(*leaders, patience_s=PATIENCE_S)
    for process in processes:
        _sweep(process)
        process.wait()


@contextmanager
def until_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets."""
    stop = threading.Event()
    former = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _look_after(child: Child, say: Say) -> None:
    now = time.monotonic()
    if child.process is None:
        if now >= child.again:
            child.process = _start(child)
    elif (code := child.process.poll()) is not None:
        _sweep(child.process)
        never_up = not child.ready and not child.restarts
        if never_up or child.restarts >= MAX_RESTARTS:
            raise ServiceError(f"{child.url}: the server ended with code {code}; {child.log} ends:\n{_tail(child.log)}")
        pause = min(2.0**child.restarts, LONGEST_PAUSE_S)
        child.process, child.ready, child.again = None, False, now + pause
        child.restarts += 1
        say(f"{child.url} died with code {code} and starts again in {pause:.0f} s; its log ends:\n{_tail(child.log)}")
    elif not child.ready and _healthy(child.url):
        child.ready = True
        say(f"{child.url} is up")


def _start(child: Child) -> subprocess.Popen[bytes]:
    with child.log.open("ab" if child.restarts else "wb") as output:
        # A session of its own: Ctrl-C is for us, and what it leaves behind can be found by its group.
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return subprocess.Popen(child.command, env=child.environment, start_new_session=True, **streams)


def _sweep(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the group of a server that has ended: its workers outlive a killed one."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _enough_gpus(runtime: Runtime, count: int) -> None:
    import torch

    needed = count * runtime.vllm.tensor_parallel
    if runtime.device != "cpu" and (found := torch.cuda.device_count()) < needed:
        raise ValueError(f"runtime.device: {runtime.device!r}: {needed} GPUs are needed here, torch finds {found}")


def _free(host: str, port: int) -> None:
    if port > 65535:
        raise ValueError(f"--port: the last server would take port {port}, and 65535 is the highest")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])

"""`mempo serve` for tests: the command itself, as a child that is ended with all that it started."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
START_S = 400.0


class Served:
    """Servers of ``policy``, up when this is made. ``state`` takes their logs."""

    def __init__(self, policy: Path, state: Path, *, count: int = 1, key: str = "") -> None:
        port = free_ports(count)
        state.mkdir(parents=True, exist_ok=True)
        self.urls = tuple(f"http://127.0.0.1:{port + index}" for index in range(count))
        self.logs = [state / "logs" / f"vllm-{port + index}.log" for index in range(count)]
        self.output = state / "serve.log"
        command = [sys.executable, "-m", "mempo.cli", "serve", str(policy), "--count", str(count), "--port", str(port)]
        environment = os.environ | {"MEMPO_STATE": str(state), "PYTHONPATH": str(ROOT)}
        if key:
            environment["VLLM_API_KEY"] = key
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, cwd=state, stdout=output, stderr=output)
        until(lambda: "ready:" in self.text() or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.output.read_text()

    def family(self) -> list[psutil.Process]:
        """The command and all that it started."""
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def server(self, url: str) -> psutil.Process:
        """The process that answers at ``url``."""
        mark = ["--port", url.rpartition(":")[2]]
        found = [child for child in psutil.Process(self.process.pid).children() if mark[1] in child.cmdline()]
        assert len(found) == 1, f"{url}: {found}"
        return found[0]

    def end(self, by: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(by)
        return self.process.wait(60)


_shared: dict[bytes, Served] = {}


def shared(policy: Path) -> Served:
    """A server for all policies of this architecture and vocabulary, until the program ends."""
    kind = b"".join((policy / name).read_bytes() for name in ("config.json", "tokenizer.json"))
    if kind not in _shared:
        _shared[kind] = Served(policy, Path(tempfile.mkdtemp()))
        atexit.register(_shared[kind].end)
    return _shared[kind]


def until(condition: Callable[[], object], deadline_s: float) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {deadline_s:.0f} s"
        time.sleep(0.1)


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nothing listens on."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first

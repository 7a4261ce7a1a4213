"""`mempo serve` without vLLM: small programs in the place of its servers."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from mempo import serving, vllm_program
from mempo.cli import app
from mempo.runtime import VLLM, Runtime
from mempo.services import ServiceError
from tests.served import free_ports, until

# Answers /health as vLLM does, and has a child that would outlive it.
SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("starting", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Run:
    """``serve`` in a thread, over servers of ``code``."""

    def __init__(
        self, policy: Path, tmp_path: Path, patch: pytest.MonkeyPatch, code: str, count: int = 1, port: int = 0,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        def program(model: Path, runtime: Runtime, *, window: int, host: str, port: int) -> list[str]:
            return [sys.executable, "-c", code, str(port)]

        patch.setattr(vllm_program, "command", program)
        patch.setattr(serving, "POLL_S", 0.05)
        patch.setattr(serving, "PATIENCE_S", 3.0)
        self.said: list[str] = []
        self.error: Exception | None = None
        self.stop = threading.Event()
        self.port = port or free_ports(count)
        self.arguments: dict[str, Any] = {"count": count, "host": "127.0.0.1", "port": self.port}
        self.policy, self.logs, self.runtime = policy, tmp_path / "logs", Runtime(device=device)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            serving.serve(self.policy, self.runtime, self.logs, say=self.said.append, stop=self.stop, **self.arguments)
        except Exception as error:
            self.error = error

    def text(self) -> str:
        return "\n".join(self.said)

    def end(self) -> None:
        self.stop.set()
        self.thread.join()


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_servers_come_up_and_all_that_they_started_ends(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()  # other tests may have left servers up for the next ones
    run = Run(tiny_policy, tmp_path, monkeypatch, SERVER, count=2)
    until(lambda: "ready" in run.text() or not run.thread.is_alive(), 60)
    urls = f"[http://127.0.0.1:{run.port}, http://127.0.0.1:{run.port + 1}]"
    assert run.said[-1] == f"ready: --set runtime.engine=vllm --set 'runtime.vllm.servers={urls}'"
    started = [process for process in children() if process not in before]
    assert len(started) == 4
    run.end()
    assert run.error is None and psutil.wait_procs(started, timeout=0)[1] == []


def test_a_server_that_died_starts_again_with_nothing_left_of_the_former(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_policy, tmp_path, monkeypatch, SERVER)
    until(lambda: "ready" in run.text(), 60)
    (leader,) = [p for p in children() if str(run.port) in p.cmdline()]
    (orphan,) = leader.children()
    leader.kill()
    until(lambda: run.text().count("is up") == 2, 60)
    assert (
        f"http://127.0.0.1:{run.port} died with code -9 and starts again in 1 s; its log ends:\nstarting" in run.text()
    )
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert run.text().count("ready:") == 1
    run.end()


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    run = Run(tiny_policy, tmp_path, monkeypatch, "print('line\\n' * 50); raise SystemExit('no memory')")
    run.thread.join(60)
    assert isinstance(run.error, ServiceError)
    assert str(run.error).startswith(f"http://127.0.0.1:{run.port}: the server ended with code 1")
    assert str(run.error).endswith("line\n\nno memory") and str(run.error).count("\n") == serving.LOG_LINES


def test_a_server_that_keeps_dying_is_given_up(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LONGEST_PAUSE_S", 0.01)
    mortal = SERVER.replace(
        "subprocess.Popen", "import threading, os; threading.Timer(0.7, os._exit, [3]).start(); str"
    )
    run = Run(tiny_policy, tmp_path, monkeypatch, mortal)
    run.thread.join(120)
    assert isinstance(run.error, ServiceError) and "ended with code 3" in str(run.error)
    assert run.text().count("starts again") == serving.MAX_RESTARTS


def test_a_port_that_is_taken_is_named_before_anything_starts(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        run = Run(tiny_policy, tmp_path, monkeypatch, SERVER, port=other.getsockname()[1])
        run.thread.join(60)
    assert isinstance(run.error, ValueError) and f"--port {run.port}: Address already in use" in str(run.error)


def test_a_port_past_the_last_one_is_named(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tiny_policy, tmp_path, monkeypatch, SERVER, count=2, port=65535)
    run.thread.join(60)
    assert isinstance(run.error, ValueError) and str(run.error).startswith("--port")
    assert not run.logs.exists()


def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    count = torch.cuda.device_count() + 1
    run = Run(tiny_policy, tmp_path, monkeypatch, SERVER, count=count, device="cuda")
    run.thread.join(60)
    told = f"runtime.device: 'cuda': {count} GPUs are needed here, torch finds {count - 1}"
    assert isinstance(run.error, ValueError) and str(run.error) == told and not run.logs.exists()


def test_a_folder_that_is_no_policy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "nowhere", tmp_path, monkeypatch, SERVER)
    run.thread.join(60)
    assert isinstance(run.error, ValueError) and "nowhere" in str(run.error)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_command_follows_the_runtime() -> None:
    make: Callable[[Runtime], list[str]] = lambda runtime: vllm_program.command(  # noqa: E731
        Path("/p"), runtime, window=512, host="127.0.0.1", port=8001
    )
    cpu = make(Runtime(max_batch=4096, vllm=VLLM(kv_cache_gib=2)))
    assert option(cpu, "--kv-cache-memory-bytes") == str(2 * 2**30) and "--enforce-eager" in cpu
    assert option(cpu, "--max-num-batched-tokens") == "4096" and option(cpu, "--max-model-len") == "512"
    gpu = make(Runtime(device="cuda", dtype="bfloat16", vllm=VLLM(tensor_parallel=2, gpu_memory_utilization=0.5)))
    assert not {"--kv-cache-memory-bytes", "--enforce-eager", "--distributed-executor-backend"} & set(gpu)
    assert option(gpu, "--tensor-parallel-size") == "2" and option(gpu, "--gpu-memory-utilization") == "0.5"
    assert option(gpu, "--dtype") == "bfloat16" and option(gpu, "--host") == "127.0.0.1"


def test_each_server_has_gpus_of_its_own() -> None:
    runtime = Runtime(device="cuda", vllm=VLLM(tensor_parallel=2))
    visible = [vllm_program.environment(runtime, index, {})["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert visible == ["0,1", "2,3"]
    named = {"CUDA_VISIBLE_DEVICES": "7,5,3,1", "VLLM_API_KEY": "k"}
    second = vllm_program.environment(runtime, 1, named)
    assert second["CUDA_VISIBLE_DEVICES"] == "3,1" and second["VLLM_API_KEY"] == "k"
    with pytest.raises(ValueError, match="names 4 GPUs, 6 are needed"):
        vllm_program.environment(runtime, 2, named)
    with pytest.raises(ValueError, match="names 0 GPUs, 2 are needed"):
        vllm_program.environment(runtime, 0, {"CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA_VISIBLE_DEVICES" not in vllm_program.environment(Runtime(), 1, {})


def test_an_address_that_others_reach_is_warned_of(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is taken, so that nothing starts."""
    monkeypatch.setenv("MEMPO_STATE", str(tmp_path))
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = str(other.getsockname()[1])
        command = ["serve", str(tiny_policy), "--port", port, "--host"]
        said = [CliRunner().invoke(app, [*command, host]).output for host in ("0.0.0.0", "127.0.0.1")]
    assert "--host 0.0.0.0: whoever reaches it may load weights" in said[0] and "whoever" not in said[1]
    assert all(f"--port {port}: Address already in use" in text for text in said)

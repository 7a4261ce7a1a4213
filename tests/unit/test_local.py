"""The state folder, the defaults, and detached servers; here a little server stands for the two large ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mempo import local, services
from mempo.services import Service, ServiceError
from tests.flow.small import forget

LITTLE = """
import http.server, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
time.sleep({delay})
{before}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({status}); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

COMMAND = ["little", "--port", services.PORT]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "state"
    forget(monkeypatch)
    monkeypatch.setenv("MEMPO_STATE", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield folder
    services.stop(folder)


def start(state: Path, *, deadline_s: float = 30.0, port: int = 0, **code: object) -> Service:
    module = state.parent / "little.py"
    if not module.exists():
        module.write_text(LITTLE.format(**({"delay": 0.0, "before": "", "status": 200} | code)))
    return services.ensure(state, "little", COMMAND, "/", port, say=lambda line: None, deadline_s=deadline_s)


def test_starts_at_once_make_one_server_and_stop_ends_it(state: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: start(state, delay=0.3), range(4)))
    assert len(found) == 1
    (service,) = found
    process = service.process()
    assert process is not None and os.getsid(process.pid) == process.pid, "a session of its own"
    assert services.alive(state) == {"little": service}
    assert services.stop(state) == [f"stopped little (pid {service.pid}, port {service.port})"]
    assert service.process() is None
    assert services.stop(state) == []


def test_the_server_outlives_its_starter_and_is_found_by_the_next(state: Path, tmp_path: Path) -> None:
    (tmp_path / "little.py").write_text(LITTLE.format(delay=0.0, before="", status=200))
    code = f"""
        from pathlib import Path
        from mempo import services
        print(services.ensure(Path({str(state)!r}), "little", {COMMAND}, "/", 0, say=print, deadline_s=30).pid)
    """
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=True
    )
    assert start(state).pid == int(done.stdout.split()[-1])


def test_a_server_that_died_is_started_anew(state: Path) -> None:
    first = start(state)
    process = first.process()
    assert process is not None
    process.kill()
    process.wait()
    second = start(state)
    assert second.pid != first.pid and second.process()
    assert services.stop(state) == [f"stopped little (pid {second.pid}, port {second.port})"]


def test_stop_ends_what_a_service_has_started_even_where_the_service_is_dead(state: Path) -> None:
    began = "import subprocess; child = subprocess.Popen(['sleep', '60'], start_new_session=True)"
    service = start(state, before=began)
    process = psutil.Process(service.pid)
    (orphan,) = process.children()
    process.kill()
    process.wait()
    assert orphan.is_running() and services.stop(state) == [f"little (pid {service.pid}) had ended already"]
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_one_service_is_stopped_alone_and_comes_back_on_its_port(state: Path) -> None:
    first = start(state)
    assert services.stop(state, "other") == [] and services.alive(state)
    assert len(services.stop(state, "little")) == 1 and services.alive(state) == {}
    assert start(state).port == first.port


def test_a_taken_port_is_left_alone(state: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert start(state, port=taken).port != taken


def test_another_programs_server_on_the_port_does_not_pass_for_ours(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The port was free when it was chosen; while our server starts, another clone's takes it and answers well.
    (tmp_path / "rival.py").write_text(LITTLE.format(delay=0.0, before="", status=200))
    port, choose = services.free_port(0), services.free_port
    monkeypatch.setattr(services, "free_port", lambda preferred: preferred or choose(0))
    rival = subprocess.Popen([sys.executable, "-m", "rival", "--port", str(port)], cwd=tmp_path)
    try:
        service = start(state, port=port, before=f"if port == {port}: time.sleep(2)")
        assert service.port != port and service.pid != rival.pid
    finally:
        rival.kill()
        rival.wait()


def test_a_server_that_ends_is_an_error_that_names_the_log(state: Path) -> None:
    with pytest.raises(ServiceError, match="little ended as it started; its log: ") as caught:
        start(state, before="sys.exit('no such database')")
    log = Path(str(caught.value).rpartition("its log: ")[2])
    assert "no such database" in log.read_text()


def test_a_server_that_never_answers_is_ended_at_the_deadline(state: Path) -> None:
    with pytest.raises(ServiceError, match="did not answer within 2 s; its log: "):
        start(state, status=503, deadline_s=2.0)
    assert services.alive(state) == {}


def test_a_recycled_pid_is_never_killed(state: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        born = psutil.Process(bystander.pid).create_time()
        stale = Service("little", bystander.pid, 1, born - 3600, "/")
        state.mkdir()
        services._write(state, {"little": stale})
        assert stale.process() is None
        assert services.stop(state) == [f"little (pid {bystander.pid}) had ended already"]
        assert bystander.poll() is None
        assert replace(stale, started=born).process() is not None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_lock_waits_up_to_its_deadline_and_a_killed_holder_lets_go(state: Path) -> None:
    root = Path(__file__).parents[2]
    code = f"""
        import sys, time
        from pathlib import Path
        from mempo import services
        with services.locked(Path({str(state)!r}), "it"):
            print("held", flush=True); time.sleep(60)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ServiceError, match="held by another process"), services.locked(state, "it", deadline_s=0.3):
        pass
    threading.Timer(0.3, holder.kill).start()
    with services.locked(state, "it", deadline_s=30):
        pass
    holder.wait()
    holder.stdout.close()


def test_settle_sets_defaults_and_leaves_what_the_user_set(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example:5000")
    assert local.settle() == state
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://tracking.example:5000"
    assert os.environ["PREFECT_HOME"] == f"{state}/prefect"
    assert os.environ["DO_NOT_TRACK"] == "true"
    assert "PREFECT_API_URL" not in os.environ


def test_the_users_servers_are_used_and_nothing_is_started(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example/")
    assert local.start() == "http://prefect.example/api"
    assert local.start_ui() == "https://tracking.example"
    assert local.running() == [] and not (state / "services.json").exists()


def test_the_state_of_a_dvc_copy_is_the_repositorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMPO_STATE", raising=False)
    copy = tmp_path / "clone" / ".dvc" / "tmp" / "exps" / "tmpab12"
    (copy / "flows").mkdir(parents=True)
    for folder in (tmp_path / "clone", copy):
        (folder / "params.yaml").touch()
    monkeypatch.chdir(copy / "flows")
    assert local.project_root() == tmp_path / "clone"
    assert local.state_folder() == tmp_path / "clone" / ".state"


def test_outside_any_project_the_checkout_is_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local.project_root() == Path(local.__file__).parents[1]


def test_clean_removes_what_was_made_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMPO_STATE", str(tmp_path / "mine"))
    for name in (
        "params.yaml",
        "data/own/facts.jsonl",
        "data/questions/corpus.jsonl",
        "runs/a/x",
        "mine/artifacts/1",
        "mine/letter",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "data" / "own")
    told = local.clean()
    assert sorted(told) == [
        f"removed {tmp_path / name}" for name in ("checkpoints", "data/questions", "mine/artifacts", "runs")
    ]
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["data/own/facts.jsonl", "mine/letter", "params.yaml"]
    assert local.clean() == []
    (tmp_path / "dvc.lock").touch()
    assert local.clean() == [f"removed {tmp_path / 'dvc.lock'}"]


def test_clean_leaves_a_lock_file_that_git_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMPO_STATE", str(tmp_path / "mine"))
    for name in ("params.yaml", "dvc.lock"):
        (tmp_path / name).touch()
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "dvc.lock"], check=True)
    assert local.clean() == []


def test_services_are_written_whole(state: Path) -> None:
    service = start(state)
    assert json.loads((state / "services.json").read_text())["little"]["pid"] == service.pid
    assert not (state / "services.tmp").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"little": {"pid": 1}}'])
def test_a_damaged_record_of_services_is_named(state: Path, text: str) -> None:
    state.mkdir(parents=True)
    services._file(state).write_text(text)
    with pytest.raises(ServiceError, match=rf"^{services._file(state)}: damaged"):
        services.stop(state)
    services._file(state).unlink()

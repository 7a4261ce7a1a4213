"""The real Prefect and MLflow servers: one for two starts at once, quiet, home folder empty, gone after ``down``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mempo import services
from tests.flow.small import ROOT, forget

FLOW = """
    from mempo import local
    url = local.start()
    from prefect import flow
    @flow
    def double(x: int) -> int:
        return 2 * x
    print(url, double(21))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty project with an empty home folder."""
    forget(monkeypatch)
    (tmp_path / "home").mkdir()
    (tmp_path / "params.yaml").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    services.stop(tmp_path / ".state")


def run(code: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def mempo(*arguments: str) -> str:
    code = "from mempo.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.server
def test_two_flows_at_once_share_one_prefect_server_that_down_ends(project: Path) -> None:
    outputs = [child.communicate(timeout=240) for child in (run(FLOW), run(FLOW))]
    (service,) = services.alive(project / ".state").values()
    assert [out.split() for out, _ in outputs] == [[f"{service.url}/api", "42"]] * 2
    assert [error for _, error in outputs] == ["", ""], "no noise"
    assert mempo("down").splitlines() == [f"stopped prefect (pid {service.pid}, port {service.port})"]
    assert service.process() is None
    assert mempo("down").splitlines() == ["nothing was running"]
    assert list((project / "home").rglob("*")) == []
    mempo("clean")
    assert sorted(path.name for path in project.iterdir()) == ["home", "params.yaml"]


@pytest.mark.server
def test_ui_serves_the_local_store_with_the_prebuilt_view(project: Path) -> None:
    code = """
        from pathlib import Path
        from tasks import tracking
        run = tracking.open_tracking("mempo", {"a": 1}, {}, Path("runs/mempo/mlflow.json"))
        tracking.log_metrics(run, {"mem_reward/p50": 0.25}, 0, 1)
    """
    assert run(code).communicate(timeout=240) == ("", "")
    url = mempo("ui", "--no-browser").splitlines()[0]
    server, _, page = url.partition("/#/experiments/")
    assert get(f"{server}/health") == "OK"
    body = json.loads(get(f"{server}/api/2.0/mlflow/experiments/get?experiment_id={page.split('/')[0]}"))
    assert "mlflow.sharedViewState.mempo" in {tag["key"] for tag in body["experiment"]["tags"]}
    assert "stopped mlflow" in mempo("down")
    assert list((project / "home").rglob("*")) == []
    assert sorted(path.name for path in project.iterdir()) == [".state", "home", "params.yaml", "runs"]


def get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_help_is_quick_to_come_and_leaves_nothing(project: Path) -> None:
    assert "down" in mempo("--help")
    assert "group_size: 8" in mempo("config")
    assert not (project / ".state").exists() and os.listdir(project / "home") == []

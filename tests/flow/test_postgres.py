"""A training that logs to an MLflow server on PostgreSQL, loses it for two rounds, and loses Prefect's server too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import mlflow
import pytest

from mempo import journal, local, services as servers
from tasks import pages
from tests.flow.postgres import PASSWORD, postgres
from tests.flow.small import PARAMS, awaited, environment, here, members, mempo, tracked_runs
from tests.flow.test_pages import everything

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture(scope="module")
def backend(services: Path) -> Iterator[str]:
    """The URL of MEMPO's own MLflow server, which stands on a PostgreSQL database."""
    with postgres() as store:
        os.environ["MLFLOW_BACKEND_STORE_URI"] = store
        yield local.start_ui()
        local.stop()
        for name in ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_TRACKING_URI"):
            del os.environ[name]


@pytest.fixture(scope="module")
def folder(services: Path, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six rounds. After the first both servers are killed; MLflow's comes back after the third."""
    root = tmp_path_factory.mktemp("w")
    (root / "params.yaml").write_text(PARAMS.replace("num_steps: 400", "num_steps: 100"))
    here(root, "prepare")
    here(root, "warmstart")
    training = subprocess.Popen(mempo(root, "train", "mempo"), env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for(training, root, "round_0000/log.json")
    for server in servers.alive(services).values():
        for member in members(server):
            member.kill()
    wait_for(training, root, "round_0002/log.json")
    assert local.start_ui() == backend, "a server that comes back is found under its former URL"
    _, told = training.communicate(timeout=240)
    assert training.returncode == 0, told
    assert "Traceback" not in told and "log-again" not in told
    (found,) = root.glob("runs/mempo-*")
    return found


def wait_for(training: subprocess.Popen[str], root: Path, name: str) -> None:
    assert awaited(training, lambda: list(root.glob(f"runs/mempo-*/{name}"))), training.communicate()[1]


def test_the_pages_are_those_of_a_run_without_outages(
    folder: Path, backend: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.set_tracking_uri(backend)
    client = mlflow.MlflowClient()
    (made,) = tracked_runs(client, folder)
    assert client.get_experiment(made.info.experiment_id).name == "mempo"
    found = everything(made.info.run_id)
    assert found["status"][1] == "FINISHED"
    assert [step for step, _, _ in found["metrics"]["em"]] == list(range(6))
    assert {index for _, index, _ in found["traces"]} == {"2", "5"}
    assert found["files"] == ["mem_reward_box.png", "mem_reward_by_turn.png", "rounds.json"]
    assert any("MLflow" in line["message"] for line in journal.last(folder, 100, level=30)), "the outage is in the log"
    mlflow.set_tracking_uri(f"sqlite:///{store}/other.db")
    assert everything(pages.log_again(folder)) == found


def test_prefect_shows_the_run_as_completed_and_its_progress(folder: Path, services: Path) -> None:
    api = f"{servers.alive(services)['prefect'].url}/api"
    runs = httpx.post(f"{api}/flow_runs/filter", json={}).json()
    assert [(one["name"], one["state_name"]) for one in runs if one["name"] == "mempo"] == [("mempo", "Completed")]
    artifacts = httpx.post(f"{api}/artifacts/filter", json={}).json()
    assert [one["data"] for one in artifacts if one["key"] == "mempo-rounds"][-1] == 100
    assert "mempo-round-0005" in {one["key"] for one in artifacts if one["type"] == "table"}


def test_no_file_and_no_command_line_holds_the_password(folder: Path, services: Path) -> None:
    assert [path for path in services.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()] == []
    assert [path for path in folder.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()] == []
    for server in servers.alive(services).values():
        assert not any(PASSWORD in " ".join(member.cmdline()) for member in members(server))

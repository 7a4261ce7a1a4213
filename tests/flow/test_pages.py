"""A run's MLflow pages from its files: complete, the same in every store, and never in training's way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pytest
from typer.testing import CliRunner

from mempo import journal
from mempo.cli import app
from mempo.workspace import Run
from tasks import pages, record, tracking
from tasks.patience import Patience
from tests.flow.run_folder import make_run


@pytest.fixture
def run(tiny_policy: Path, tmp_path: Path) -> Run:
    return make_run(tmp_path / "w", tiny_policy)


def everything(run_id: str) -> dict[str, Any]:
    """All that a store has of a run, but what it names by itself."""
    client = mlflow.MlflowClient()
    found = client.get_run(run_id)
    own = ("mempo.key", "mlflow.user", "mlflow.source", "mlflow.runName")
    metrics = {
        name: [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, name)]
        for name in found.data.metrics
    }
    files = sorted(entry.path for entry in client.list_artifacts(run_id))
    traced = client.search_traces(locations=[found.info.experiment_id], run_id=run_id, max_results=100)
    return {
        "metrics": {name: sorted(points) for name, points in metrics.items()},
        "params": found.data.params,
        "tags": {name: value for name, value in found.data.tags.items() if not name.startswith(own)},
        "table": Path(client.download_artifacts(run_id, "rounds.json")).read_text(),
        "files": files,
        "traces": sorted((t.info.trace_id, t.info.tags["round"], len(t.data.spans)) for t in traced),
        "status": (found.info.run_name, found.info.status, found.info.start_time, found.info.end_time),
    }


def trained(run: Run, *, tags: dict[str, str]) -> str:
    """The pages as a training makes them, round by round."""
    with record.tracked(run, tags) as opened:
        for index in range(6):
            assert opened.mlflow.attempt(partial(pages.update, run, opened.pages, index), 60)
    return tracking.begin(opened.pages)


def test_pages_made_again_are_those_of_the_training(run: Run, store: Path) -> None:
    first = everything(trained(run, tags={"variant": "a"}))
    # A round lasts 10 s; its update ends after 7.5 s, with a look at known memories, in even rounds, after 8.5 s.
    ends = [1_796_000_008_500, 1_796_000_017_500, 1_796_000_028_500]
    assert first["metrics"]["em"][:3] == [(i, i / 10, at) for i, at in enumerate(ends)]
    assert [len(points) for points in first["metrics"].values() if len(points) > 6] == []
    assert first["files"] == ["mem_reward_box.png", "mem_reward_by_turn.png", "rounds.json"]
    assert {round_index for _, round_index, _ in first["traces"]} == {"2", "5"} and len(first["traces"]) == 2 * 4
    assert first["status"][:2] == ("mempo", "FINISHED") and first["tags"]["variant"] == "a"
    assert everything(pages.log_again(run.folder)) == first, "in the same store nothing changes"
    mlflow.set_tracking_uri(f"sqlite:///{store}/other.db")
    again = everything(pages.log_again(run.folder))
    assert again == first
    assert everything(pages.log_again(run.folder)) == again


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_two_rounds_without_a_server_leave_no_gap(run: Run, store: Path, dead: str) -> None:
    alive = mlflow.get_tracking_uri()
    done = []
    with record.tracked(run, {}) as opened:
        for index in range(6):
            mlflow.set_tracking_uri(dead if index in (1, 2) else alive)
            opened.mlflow.silent_until = 0.0
            done.append(opened.mlflow.attempt(partial(pages.update, run, opened.pages, index), 60))
    assert done == [True, False, False, True, True, True]
    found = everything(tracking.begin(opened.pages))
    mlflow.set_tracking_uri(f"sqlite:///{store}/other.db")
    assert found == everything(pages.log_again(run.folder))
    told = [line["message"] for line in journal.last(run.folder, 10, level=30)]
    assert len(told) == 2 and all("MLflow: " in line and "training goes on" in line for line in told)


def test_a_server_that_is_away_at_the_end_is_told_and_logged_again(
    run: Run, store: Path, dead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alive = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(dead)
    with pytest.raises(KeyError), record.tracked(run, {}):
        raise KeyError("a mistake")
    assert f"mempo log-again {run.folder}" in capsys.readouterr().err.replace("\n", "")
    refused = CliRunner().invoke(app, ["log-again", str(run.folder)])
    assert refused.exit_code == 1 and refused.output.startswith(
        "mempo: MlflowException: API request to http://127.0.0.1"
    )
    mlflow.set_tracking_uri(alive)
    done = CliRunner().invoke(app, ["log-again", str(run.folder)])
    assert done.exit_code == 0, done.output
    assert everything(done.output.split()[-1])["status"][1] == "FAILED"


@pytest.mark.parametrize(("raised", "status"), [(SystemExit(1), "KILLED"), (ValueError("x"), "FAILED")])
def test_a_run_ends_as_what_stopped_it(run: Run, store: Path, raised: BaseException, status: str) -> None:
    with pytest.raises(type(raised)), record.tracked(run, {}) as opened:
        raise raised
    assert opened.mlflow.working
    opened.mlflow.working.join(60)  # a signal leaves no time to wait for a slow store
    assert mlflow.MlflowClient().get_run(tracking.begin(opened.pages)).info.status == status
    assert journal.last(run.folder, 1)[0]["message"].startswith(f"failed: {type(raised).__name__}")


def test_a_run_that_was_killed_is_not_left_running(run: Run, store: Path) -> None:
    tracking.begin(pages.open_pages(run, {}))
    assert mlflow.MlflowClient().get_run(pages.log_again(run.folder)).info.status == "KILLED"


def test_who_waits_for_a_server_waits_for_a_bounded_time() -> None:
    """The first job is never answered: the second does not begin before it, and each caller goes on."""
    answer, begun = threading.Event(), []
    patience = Patience("MLflow")
    assert not patience.attempt(lambda: answer.wait(60), wait_s=0.05)
    assert not patience.attempt(lambda: begun.append(2), wait_s=0.05)
    assert begun == []
    answer.set()
    assert patience.attempt(lambda: begun.append(3), wait_s=30) and begun == [3]


def test_after_a_failure_nothing_is_tried_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def fail() -> None:
        tried.append(1)
        time.sleep(0.2)
        raise OSError("no route to postgresql://me:hunter2@host/db\nand more")

    patience = Patience("MLflow")
    assert [patience.attempt(fail, wait_s=30) for _ in range(3)] == [False] * 3
    assert len(tried) == 1
    (warning,) = (line.getMessage() for line in caplog.records if line.name == "tasks.patience")
    assert "no route" in warning and "hunter2" not in warning and "and more" not in warning

"""A state folder for the tests alone, settled before prefect or mlflow is imported, and one Prefect server for all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mempo import local
from tests.flow.small import SETTLED, forget

for name in SETTLED:
    os.environ.pop(name, None)
_FOLDER = tempfile.TemporaryDirectory(prefix="mempo-tests-", ignore_cleanup_errors=True)
os.environ["MEMPO_STATE"] = f"{_FOLDER.name}/state"
local.settle()


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real Prefect API for tests that run flows; the heartbeat's thread would add a second to each flow."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_LOGGING_LEVEL, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    quiet = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_LEVEL: "ERROR"}
    with temporary_settings(quiet), prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with all tables and no runs: making one takes MLflow seconds, copying it none."""
    import mlflow

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def store(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder with an empty store, its name with a blank; mlflow goes back to its former store after."""
    import mlflow

    state = tmp_path / "a state"
    state.mkdir()
    shutil.copy(empty_store, state / "mlflow.db")
    shutil.copy(empty_store, state / "other.db")
    monkeypatch.setenv("MEMPO_STATE", str(state))
    former = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{state}/mlflow.db")
    yield state
    mlflow.set_tracking_uri(former)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One local Prefect server and one MLflow store for the module, started as a user's command starts them."""
    state = tmp_path_factory.mktemp("services")
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        patch.setenv("MEMPO_STATE", str(state))
        local.start()
        yield state
        local.stop()

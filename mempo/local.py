"""This project on this machine: its root, its one state folder, quiet defaults, its local servers and workers.

``settle()`` and ``start()`` come before ``import prefect`` or ``import mlflow``: both read their environment once. A
``PREFECT_API_URL`` or ``MLFLOW_TRACKING_URI`` of the user's wins, and then nothing is started here. State lies under
``<project>/.state`` (or ``MEMPO_STATE``), never in the home folder, so two clones share nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mempo import services
from mempo.services import DEADLINE_S, Say, Service

# What ``clean`` removes: outputs and caches under the root and each profile, of the state folder only what is ours.
MADE = (
    *("runs", "data/questions", "checkpoints", "results", "metrics", "report", "plots", "dvc_plots"),
    *("ablation", "ablation-quick", "evaluation"),
    "params/smollm2/pretrained",
    *(".dvc/cache", ".dvc/tmp", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
)
STATE_MADE = (
    *("prefect", "mlflow.db", "mlflow.db-shm", "mlflow.db-wal", "mlflow.db-journal", "artifacts", "matplotlib", "dvc"),
    *("logs", "locks"),
)
PORTS = {"prefect": 4200, "mlflow": 5000}
# Set beside PREFECT_API_URL where the URL is our own server's: an URL alone is the user's.
_OURS = "MEMPO_PREFECT_API_URL"


def project_root() -> Path:
    """The nearest folder with a params.yaml from the current one upwards, else this checkout.

    Copies that ``dvc exp run --queue`` makes under ``.dvc/tmp/exps`` stand for the repository they were made from.
    """
    checkout = Path(__file__).resolve().parents[1]
    here = Path.cwd()
    found = next((folder for folder in (here, *here.parents) if (folder / "params.yaml").is_file()), checkout)
    return Path(str(found).split("/.dvc/tmp/exps/")[0])


def enter_project() -> dict[str, str]:
    """A step of prefect.yaml: a flow runs in the project folder that its worker was started with (``MEMPO_ROOT``)."""
    folder = os.environ.get("MEMPO_ROOT") or str(project_root())
    os.chdir(folder)
    return {"directory": folder}


def state_folder() -> Path:
    return Path(os.environ.get("MEMPO_STATE") or project_root() / ".state").absolute()


def settle() -> Path:
    """Environment defaults for this process and its children; what the user has set stays. Returns the state folder."""
    state = state_folder()
    state.mkdir(parents=True, exist_ok=True)
    if os.environ.get("MLFLOW_BACKEND_STORE_URI"):  # of the server here: trainings go through it
        server = services.alive(state).get("mlflow")
        os.environ.setdefault("MLFLOW_TRACKING_URI", server.url if server else f"http://127.0.0.1:{PORTS['mlflow']}")
    for name, value in _defaults(state).items():
        os.environ.setdefault(name, value)
    if "PREFECT_API_URL" not in os.environ and (service := services.alive(state).get("prefect")):
        _use(service)
    return state


def start(*, say: Say = lambda line: None, deadline_s: float = DEADLINE_S) -> str:
    """The Prefect API's URL: the user's, the running local server's, or that of one started now.

    Raises ``ServiceError`` with the log's path where no server answers within ``deadline_s``.
    """
    state = settle()
    url = os.environ.get("PREFECT_API_URL")
    known = services.recorded(state).get("prefect")  # a user may have exported the URL of our own
    if url and url not in (os.environ.get(_OURS), known and f"{known.url}/api"):
        return url
    command = ["prefect", "server", "start"]
    # Not as options: its pages would look for the API at the default port.
    address = {"PREFECT_SERVER_API_HOST": "127.0.0.1", "PREFECT_SERVER_API_PORT": services.PORT}
    service = services.ensure(
        state, "prefect", command, "/api/health", PORTS["prefect"], say=say, deadline_s=deadline_s, environment=address
    )
    return _use(service)


def revive() -> None:
    """Start our own Prefect server again where it has died; one that ``down`` stopped stays away."""
    ours = os.environ.get(_OURS)
    if ours and ours == os.environ.get("PREFECT_API_URL") and "prefect" in services.recorded(state_folder()):
        start()


def start_ui(*, say: Say = lambda line: None, deadline_s: float = DEADLINE_S) -> str:
    """The MLflow server's URL: the user's where tracking goes over HTTP, else that of a local one over the store.

    ``MLFLOW_BACKEND_STORE_URI`` names another store for it, such as a PostgreSQL database; runs are logged through it.
    """
    state = settle()
    store = os.environ.get("MLFLOW_BACKEND_STORE_URI") or os.environ["MLFLOW_TRACKING_URI"]
    if store.startswith("http"):
        return store.rstrip("/")
    command = ["mlflow", "server", "--artifacts-destination", (state / "artifacts").as_uri(), "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", services.PORT]
    # Its password is nobody's business: it does not stand on the command line.
    environment = {"MLFLOW_BACKEND_STORE_URI": store}
    service = services.ensure(
        state, "mlflow", command, "/health", PORTS["mlflow"], say=say, deadline_s=deadline_s, environment=environment
    )
    if "MLFLOW_BACKEND_STORE_URI" in os.environ:
        os.environ["MLFLOW_TRACKING_URI"] = service.url
    return service.url


def stop() -> list[str]:
    """End exactly the servers and workers that were started from this state folder; a line on each."""
    done = services.stop(state_folder())
    if ours := os.environ.pop(_OURS, None):
        os.environ.pop("PREFECT_API_URL", ours)
    return done


def running() -> list[Service]:
    """The servers and workers of this state folder that are alive."""
    return list(services.alive(state_folder()).values())


def clean() -> list[str]:
    """Stop the servers and remove what the project made: state, runs, DVC outputs and caches. A line on each."""
    done, root, state = stop(), project_root(), state_folder()
    homes = [root, *sorted(file.parent for file in root.glob("params/*/params.yaml"))]
    for path in [*(home / name for home in homes for name in MADE), *(state / name for name in STATE_MADE)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.exists() or path.is_symlink():
            path.unlink()
        else:
            continue
        done.append(f"removed {path}")
    for lock in (root / "params" / "dvc.lock", *(home / "dvc.lock" for home in homes)):
        if lock.exists() and not _in_git(lock):
            lock.unlink()
            done.append(f"removed {lock}")
    for folder in (state, *(home / "data" for home in homes)):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return done


def _in_git(path: Path) -> bool:
    """Whether git keeps ``path``: then it is the user's, whoever made it."""
    asked = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", path.name]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process of this state folder at a time."""
    with services.locked(state_folder(), name):
        yield


def _use(service: Service) -> str:
    os.environ["PREFECT_API_URL"] = os.environ[_OURS] = url = f"{service.url}/api"
    return url


def _defaults(state: Path) -> dict[str, str]:
    return {
        "MEMPO_STATE": str(state),
        "MEMPO_ROOT": str(project_root()),
        "DO_NOT_TRACK": "true",
        "VLLM_CACHE_ROOT": f"{state}/vllm",
        # Threads that wait asleep: spinning ones slow each other down as soon as another program wants a core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PREFECT_HOME": f"{state}/prefect",
        # The processes of a pool take it from the home folder, whatever PREFECT_HOME says.
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": f"{state}/prefect/storage",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",  # what a task failed of is kept, by default as a pickle
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        # An error is told once, by the command; its trace is in Prefect's pages.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # a server that is away would fill the terminal with events
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_CLIENT_MAX_RETRIES": "2",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; automations.yaml counts on it
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{state}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # A tracking server that is down: two tries of 5 s, not four minutes.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MPLCONFIGDIR": f"{state}/matplotlib",
        "MPLBACKEND": "agg",
        "DVC_NO_ANALYTICS": "true",
        "DVC_SITE_CACHE_DIR": f"{state}/dvc",
        "ITERATIVE_DO_NOT_TRACK": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }

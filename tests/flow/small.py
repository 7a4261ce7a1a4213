"""The experiment in small, for tests: a policy of 60,000 parameters that learns the turn format and nothing else.

And its commands: their environment, their processes, the MLflow run of a run folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest

from mempo import local, storage
from mempo.services import Service
from tests.served import ROOT

if TYPE_CHECKING:  # not imported before the environment is settled
    from mlflow import MlflowClient
    from mlflow.entities import Run

Found = TypeVar("Found")
# What ``local`` writes into the environment.
SETTLED = frozenset({*local._defaults(Path()), "PREFECT_API_URL", local._OURS})

PARAMS = """
preset: null
data: {num_countries: 120, num_cities: 200, num_train: 64, num_dev: 4, num_test: 8, max_name_tokens: 3}
model: {vocab_size: 1024, hidden_size: 64, intermediate_size: 64, num_layers: 2, num_heads: 4, window: 1024}
prompt: {}
format: {require_memory: true}
warmstart:
  {num_steps: 400, copy_steps: 1, batch_size: 8, learning_rate: 3e-3, warmup_steps: 20, save_every: 100, num_threads: 1}
search: {}
rollout: {}
scoring: {}
# So small a policy answers nothing right: what it is paid for here is the format, or nothing would be learnt.
reward: {kind: f1, format_credit: 0.5}
mem_reward: {}
advantage: {mem_weight: 1.0}
loss: {}
lora: {}
optim: {learning_rate: 1e-3}
loop: {num_rounds: 6, questions_per_round: 2, group_size: 4, dev_every: 3}
evaluation: {num_questions: 8}
runtime: {num_threads: 1}
tracking: {figure_every: 3}
diagnose: {every: 2}
policies:
  mempo: {}
  grpo: {advantage: {mem_weight: 0.0}}
  full_context: {rollout: {context: full}, format: {require_memory: false}, advantage: {mem_weight: 0.0}}
suites:
  far:
    datasets:
      own: {split: test, max_questions: 3}
      more: {source: geo, max_questions: 4, objectives: {1: 1, 6: 1}}
    settings: {rollout: {max_prompt_tokens: 256}}
    samples: 2
    agents:
      memory: {policy: mempo}
      recent: {policy: warmstart, rollout: {context: recent}, format: {require_memory: false}}
"""


def environment() -> dict[str, str]:
    """This checkout first on the module path, this interpreter's programs first on the path."""
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {"PYTHONPATH": str(ROOT), "PATH": scripts}


def forget(patch: pytest.MonkeyPatch) -> None:
    """Nothing is settled in this process any more. ``patch`` takes back what is settled from here on."""
    for name in SETTLED:
        patch.setenv(name, "")  # or it would not take back what is absent now
        patch.delenv(name)


def mempo(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mempo.cli", *arguments, "--root", str(root)]


def run(command: list[str], cwd: Path | None = None) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def here(root: Path, *arguments: str) -> str:
    """Output of a command that must succeed, in this process: a child's imports take longer than such work."""
    import mlflow
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from typer.testing import CliRunner

    from mempo.cli import app

    # Both read the environment once in a process; other tests were here before.
    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    ours = {PREFECT_API_URL: os.environ["PREFECT_API_URL"], PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with temporary_settings(ours):
        done = CliRunner().invoke(app, [*arguments, "--root", str(root)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def awaited(process: subprocess.Popen[Any], look: Callable[[], Found], deadline_s: float = 240.0) -> Found:
    """What ``look`` finds, as soon as it finds something; nothing where ``process`` ends or ``deadline_s`` passes."""
    give_up = time.monotonic() + deadline_s
    while not (found := look()) and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.002)
    return found


def killed(command: list[str], look: Callable[[], Found], cwd: Path | None = None) -> Found:
    """Start ``command`` and kill it, and all that it has started, as soon as ``look`` finds something."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(command, cwd=cwd, env=environment(), start_new_session=True, **quiet)
    found = awaited(started, look)
    assert found, "it ended before it could be killed"
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    return found


def members(service: Service) -> list[psutil.Process]:
    """The process of a service that is alive, and all below it."""
    leader = service.process()
    assert leader, service
    return [leader, *leader.children(recursive=True)]


def tracked_runs(client: MlflowClient, folder: Path) -> list[Run]:
    """MLflow's runs with the key of a run folder: one, where all is well."""
    key, experiments = storage.read_json(folder / "mlflow.json")["key"], client.search_experiments()
    return list(client.search_runs([e.experiment_id for e in experiments], f"tags.`mempo.key` = '{key}'"))

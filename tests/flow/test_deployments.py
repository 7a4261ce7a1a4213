"""``mempo up``: servers, workers and deployments of this checkout; a run on a worker is the run of the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mempo import family, local, services
from tests.flow.small import PARAMS, awaited, environment, forget, mempo, run

SMALL = PARAMS.replace("num_rounds: 6", "num_rounds: 2")
DEPLOYED = {"ablate", "driver", "evaluate", "prepare", "shard", "suite", "train", "warmstart"}
PREPARE = "from pathlib import Path; from mempo import stages; "
PREPARE += "stages.prepare(None, Path('.')); stages.warmstart(None, Path('.'))"
OVERRIDES = {"loop": {"questions_per_round": 3}, "optim": {"learning_rate": 2e-3}}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mempo.cli", *words]


def deployment_run(name: str, *words: str) -> subprocess.Popen[str]:
    parts = ["-m", "prefect", "deployment", "run", name, *words]
    return subprocess.Popen(
        [sys.executable, *parts], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def asked(what: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = httpx.post(f"{os.environ['PREFECT_API_URL']}/{what}/filter", json={}).json()
    return found


def processes(state: Path) -> list[int]:
    return [process.pid for name in services.recorded(state) for process in family.marked(f"{state.resolve()}:{name}")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with data and a warm start, for which all is up."""
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "params.yaml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        patch.chdir(folder)
        local.settle()
        try:
            prepared = subprocess.Popen([sys.executable, "-c", PREPARE], env=environment())
            run(command("up", "--workers", "2"))
            assert prepared.wait() == 0
            local.settle()
            yield folder
        finally:
            local.stop()


@pytest.mark.server
def test_up_deploys_every_flow_and_twice_changes_nothing(project: Path) -> None:
    before = services.recorded(project / ".state")
    assert list(before) == ["prefect", "mlflow", "cpu-0", "gpu-0", "gpu-1"]
    run(command("up", "--workers", "2"))
    assert services.recorded(project / ".state") == before
    assert {found["name"] for found in asked("deployments")} == DEPLOYED
    assert sorted(found["name"] for found in asked("automations")) == [
        "mempo-lost-run-crashed",
        "mempo-lost-run-goes-on",
    ]


@pytest.mark.server
def test_the_server_refuses_wrong_overrides(project: Path) -> None:
    wrong = {"num_rondes": {"loop": {"num_rondes": 3}}, "less than the minimum of 1": {"loop": {"num_rounds": 0}}}
    runs = [deployment_run("train/train", "-p", f"overrides={json.dumps(given)}") for given in wrong.values()]
    for refused, message in zip(runs, wrong, strict=True):
        said = " ".join(refused.communicate()[0].split())
        assert refused.returncode == 1 and "Validation failed" in said and message in said


@pytest.mark.server
def test_a_run_on_a_worker_makes_the_weights_of_the_command_and_a_failed_one_fails(project: Path) -> None:
    beside = project / "beside"
    for name in ("data", "checkpoints"):
        shutil.copytree(project / name, beside / name)
    shutil.copy(project / "params.yaml", beside)
    on_worker = deployment_run("train/train", "-p", f"overrides={json.dumps(OVERRIDES)}", "--watch")
    fails = deployment_run("prepare/prepare", "-p", f"root={project / 'nowhere'}", "--watch")
    run(mempo(beside, "train", "--set", "loop.questions_per_round=3", "--set", "optim.learning_rate=2e-3"))
    assert "Completed" in on_worker.communicate()[0] and on_worker.returncode == 0
    assert "Failed" in fails.communicate()[0] and fails.returncode == 1
    trained, start = (f"checkpoints/{name}/final/model.safetensors" for name in ("mempo", "warmstart"))
    assert (project / trained).read_bytes() == (beside / trained).read_bytes() != (beside / start).read_bytes()


@pytest.mark.server
def test_shards_end_in_the_same_weights_though_a_worker_is_killed_in_the_round(project: Path) -> None:
    """A driver on the pool cpu, its round on two workers of gpu, of which one dies: its flow goes on without it."""
    loop = {"num_rounds": 1, "questions_per_round": 2, "dev_every": 0}
    settings = {"loop": loop, "rollout": {"block_questions": 1}, "diagnose": {"every": 0}}
    sharded = settings | {"shards": {"deployment": "shard/shard", "count": 2}}
    driver = deployment_run("train/driver", "-p", f"overrides={json.dumps(sharded)}", "-p", "name=grpo", "--watch")
    parts = awaited(driver, lambda: list(project.glob("runs/grpo-*/round_0000/parts/rollout_*.json")))
    assert parts, "it ended before a worker could be killed"
    os.kill(services.recorded(project / ".state")["gpu-1"].pid, signal.SIGKILL)
    given = [word for section in ("loop", "rollout", "diagnose") for word in words_of(section, settings[section])]
    run(mempo(project / "beside", "train", "grpo", *given))
    told = driver.communicate()[0]
    assert "Completed" in told and driver.returncode == 0
    assert not list(project.glob("runs/grpo-*/round_0000/parts"))
    trained = "checkpoints/grpo/final/model.safetensors"
    assert (project / trained).read_bytes() == (project / "beside" / trained).read_bytes()


def words_of(section: str, values: dict[str, int]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{section}.{key}={value}")]


@pytest.mark.server
def test_down_leaves_no_process_workers_first(project: Path) -> None:
    state = project / ".state"
    before = processes(state)
    assert len(before) >= 4
    told = run(command("down")).splitlines()
    ended = [line.removeprefix("stopped ").split()[0] for line in told]
    assert ended == ["gpu-1", "gpu-0", "cpu-0", "mlflow", "prefect"]
    assert processes(state) == [] and not any(os.path.exists(f"/proc/{pid}") for pid in before)

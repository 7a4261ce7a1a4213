"""The ablation matrix in small: cells side by side in processes of their own, one that fails, nothing done twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mlflow
import pandas as pd
import psutil
import pytest

from mempo import storage
from tests.flow.small import PARAMS, environment, mempo, run
from tests.served import until

pytestmark = [pytest.mark.slow, pytest.mark.server]

MATRIX = """
ablate:
  mixes: [easy]
  seeds: [0]
  targets: {easy: 0.5}
  baselines: [grpo]
  variants:
    grpo: {advantage: {mem_weight: 0.0}}
    broken: {optim: {learning_rate: 1.0e+38}}
    ahead: {scoring: {lookahead: 1}, mem_reward: {mask: none}}
"""
SMALL = PARAMS.replace("num_steps: 400", "num_steps: 200")  # enough for a memory here and there
SETTINGS = ["--set", "loop.num_rounds=2"]


@pytest.fixture(scope="module")
def study(services: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ablate")
    (root / "params.yaml").write_text(SMALL + MATRIX)
    command = mempo(root, "ablate", *SETTINGS)
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run(command, env=environment() | {"HOME": str(home)}, capture_output=True, text=True, check=False)
    assert not list(home.iterdir()), "processes of the pool leave nothing in the home folder either"
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "failed: easy/0/broken" in done.stderr and "without overflow" in done.stderr
    assert "Traceback" not in done.stderr  # one line says it
    return root


def stamps(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.glob("ablation/*/*/*/*")}


def test_one_failure_does_not_stop_the_rest(study: Path) -> None:
    folder = study / "ablation" / "easy" / "seed_0"
    assert sorted(path.name for path in folder.iterdir()) == ["ahead", "broken.failed.txt", "grpo"]
    assert storage.read_json(folder / "ahead" / "cell.json")["variant"] == "ahead"
    assert len(pd.read_parquet(folder / "ahead" / "rounds.parquet")) == 2
    assert len(pd.read_parquet(folder / "grpo" / "evaluation.parquet")) == 16  # 8 questions, sampled and greedy
    assert pd.read_parquet(folder / "ahead" / "rewards.parquet")["p_mem"].notna().any()
    page = (study / "ablation" / "index.html").read_text()
    assert ">ahead</td>" in page and ">broken</td>" not in page


def test_only_what_is_missing_runs_again(study: Path) -> None:
    before = stamps(study)
    run(mempo(study, "ablate", *SETTINGS, "--variant", "grpo", "--variant", "ahead"))
    assert stamps(study) == before
    # Another setting of one variant makes that one cell again.
    changed = SMALL + MATRIX.replace("lookahead: 1", "lookahead: 2")
    (study / "params.yaml").write_text(changed)
    run(mempo(study, "ablate", *SETTINGS, "--variant", "grpo", "--variant", "ahead"))
    after = stamps(study)
    assert {Path(path).parent.name for path in before if after[path] != before[path]} == {"ahead"}


def test_runs_are_flat_and_can_be_grouped(study: Path, services: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{services}/mlflow.db")
    found = mlflow.search_runs(experiment_names=["mempo-ablation"])
    grpo = found[found["tags.variant"] == "grpo"].iloc[0]
    assert grpo["tags.ablation"] == "easy" and grpo["tags.seed"] == "0"
    for tag in ("data_hash", "git_commit", "config_hash", "flow_run_id"):
        assert grpo[f"tags.{tag}"], tag
    assert "tags.mlflow.parentRunId" not in found or found["tags.mlflow.parentRunId"].isna().all()
    assert set(found["status"]) <= {"FINISHED", "FAILED"}


def test_a_kill_takes_what_it_names_and_nothing_else(study: Path, tmp_path: Path) -> None:
    """A cell's: the other goes on. The command's: that one too."""
    root = tmp_path / "w"
    shutil.copytree(study, root)
    shutil.rmtree(root / "ablation")
    command = [*mempo(root, "ablate", "--variant", "grpo", "--variant", "ahead"), "--set", "loop.num_rounds=200"]
    child = subprocess.Popen(command, env=environment(), text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    cells = running_cells(child.pid, 2)
    cells[0].kill()
    psutil.wait_procs(cells[:1], timeout=30)
    assert cells[1].is_running(), "the other cell goes on"
    child.terminate()  # SIGINT is deaf in a shell's background jobs, and what they start inherits that
    child.communicate(timeout=60)
    assert child.returncode != 0
    gone, alive = psutil.wait_procs(cells, timeout=30)
    assert len(gone) == 2 and not alive, "no cell outlives the command"


def running_cells(pid: int, count: int) -> list[psutil.Process]:
    """The processes of ``count`` cells that have begun to train."""
    found: list[psutil.Process] = []

    def begun() -> bool:
        try:
            found[:] = [c for c in psutil.Process(pid).children() if "spawn_main" in " ".join(c.cmdline())]
            return len(found) == count and all(c.cpu_times().user > 3 for c in found)
        except psutil.NoSuchProcess:  # one that had nothing to train
            return False

    until(begun, 120)
    return found

"""Real DVC over the real stages, in a repository of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from mempo import storage
from tests.buckets import make_bucket, serving
from tests.flow.small import PARAMS, ROOT, environment, killed, mempo, run

pytestmark = [pytest.mark.slow, pytest.mark.server]


def dvc(repo: Path, *arguments: str) -> str:
    return run([sys.executable, "-m", "dvc", *arguments], cwd=repo)


def git(repo: Path, *arguments: str) -> str:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return run(["git", *author, *arguments], cwd=repo)


@pytest.fixture(scope="module")
def repo(services: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with this project's pipeline and small settings, reproduced once."""
    repo = tmp_path_factory.mktemp("repo")
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, repo / name)
    for name in ("mempo", "flows", "tasks"):
        shutil.copytree(ROOT / name, repo / name, ignore=shutil.ignore_patterns("__pycache__"))
    (repo / "params.yaml").write_text(PARAMS.replace("num_rounds: 6", "num_rounds: 2"))
    git(repo, "init", "-q")
    dvc(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "start")
    dvc(repo, "repro")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "reproduced")
    return repo


def test_the_whole_graph_leaves_its_outputs(repo: Path):
    metrics = storage.read_json(repo / "metrics" / "evaluation.json")
    assert list(metrics) == ["full_context", "grpo", "mempo", "warmstart"]  # sorted keys
    assert (repo / "report" / "index.html").stat().st_size > 10_000
    assert "em" in dvc(repo, "metrics", "show")
    # all that was made is ignored by git but the one file that DVC wants committed
    assert git(repo, "show", "--name-only", "--format=", "HEAD").split() == ["dvc.lock"]


def test_nothing_changed_means_nothing_runs(repo: Path):
    assert "Data and pipelines are up to date." in dvc(repo, "repro")


def test_a_second_clone_reproduces_from_the_cache_without_training(repo: Path, tmp_path: Path):
    clone = tmp_path / "clone"
    git(repo, "clone", "-q", str(repo), str(clone))
    dvc(clone, "cache", "dir", str(repo / ".dvc" / "cache"))
    dvc(clone, "checkout")
    assert "Data and pipelines are up to date." in dvc(clone, "repro")
    assert not (clone / "runs").exists()


def test_only_what_depends_on_a_setting_runs(repo: Path, tmp_path: Path):
    copied = tmp_path / "repo"
    shutil.copytree(repo, copied, symlinks=True)
    told = dvc(copied, "exp", "run", "-S", "advantage.mem_weight=0.5", "-n", "half")
    assert "Stage 'prepare' didn't change, skipping" in told and "Stage 'warmstart' didn't change, skipping" in told
    assert "Running stage 'train@mempo'" in told and "Running stage 'evaluate'" in told
    # its own override hides the change from grpo: the rounds in its run folder are found, not made again
    assert len(list(copied.glob("runs/grpo-*"))) == 1 and len(list(copied.glob("runs/mempo-*"))) == 2
    assert "advantage.mem_weight" in dvc(copied, "params", "diff")
    assert "metrics/" in dvc(copied, "metrics", "diff")
    assert "index.html" in dvc(copied, "plots", "show")


def test_a_stage_killed_half_way_goes_on_and_leaves_no_stale_success(repo: Path, tmp_path: Path):
    copied = tmp_path / "repo"
    shutil.copytree(repo, copied, symlinks=True)
    params = (copied / "params.yaml").read_text()
    (copied / "params.yaml").write_text(params.replace("num_rounds: 2", "seed: 1, num_rounds: 2"))
    former, command = set(copied.glob("runs/mempo-*")), [sys.executable, "-m", "dvc", "repro", "train@mempo"]
    found = killed(
        command, lambda: [f for f in copied.glob("runs/mempo-*/round_0001") if f.parent not in former], cwd=copied
    )
    first = found[0].with_name("round_0000") / "rollouts.parquet"
    made = first.stat().st_mtime_ns
    assert "train@mempo" in dvc(copied, "status", "train@mempo")
    dvc(copied, "repro", "train@mempo")
    assert first.stat().st_mtime_ns == made
    assert (copied / "checkpoints" / "mempo" / "final" / "model.safetensors").exists()
    assert "up to date" in dvc(copied, "status", "train@mempo")


def test_a_stage_that_fails_fails_the_run(repo: Path, tmp_path: Path):
    copied = tmp_path / "repo"
    shutil.copytree(repo, copied, symlinks=True)
    params = (copied / "params.yaml").read_text()
    (copied / "params.yaml").write_text(params.replace("group_size: 4", "group_sise: 4"))
    with pytest.raises(AssertionError, match=r"loop\.group_sise: unknown key; did you mean group_size\?"):
        dvc(copied, "repro")


@pytest.fixture(scope="module")
def remotes(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``folder`` and ``bucket``, with all outputs pushed."""
    with serving():
        for name, place in {"folder": str(tmp_path_factory.mktemp("remote")), "bucket": make_bucket("dvc")}.items():
            dvc(repo, "remote", "add", name, place)
            assert "files pushed" in dvc(repo, "push", "--remote", name)
        git(repo, "commit", "-qam", "remotes")
        yield


@pytest.mark.parametrize("remote", ["folder", "bucket"])
def test_a_second_clone_pulls_and_reports_the_same_without_training(
    repo: Path, remotes: None, tmp_path: Path, remote: str
) -> None:
    clone = tmp_path / "clone"
    git(repo, "clone", "-q", str(repo), str(clone))
    assert "files fetched" in dvc(clone, "pull", "--remote", remote)
    assert "Data and pipelines are up to date." in dvc(clone, "repro")
    shutil.rmtree(clone / "report")
    run(mempo(clone, "report"), cwd=clone)
    assert storage.content_hash(clone / "report") == storage.content_hash(repo / "report")
    assert not (clone / "runs").exists() and "up to date" in dvc(clone, "status")


def test_a_rerun_over_hard_links_leaves_the_cache_whole(repo: Path, tmp_path: Path) -> None:
    """Links are read-only and share their bytes with the cache: what is made again is another file."""
    copied = tmp_path / "repo"
    shutil.copytree(repo, copied, symlinks=True)
    dvc(copied, "config", "cache.type", "hardlink")
    dvc(copied, "checkout", "--relink")
    weights = copied / "checkpoints" / "grpo" / "final" / "model.safetensors"
    linked = weights.stat()
    assert linked.st_nlink > 1 and linked.st_mode & 0o222 == 0
    (weights.parents[2] / ".grpo.0123456789ab.tmp").mkdir()  # what a killed write leaves
    (weights.parents[2] / ".grpo.0123456789ab.tmp" / "half").write_text("half")
    assert "up to date" in dvc(copied, "status", "evaluate")
    run(mempo(copied, "train", "grpo"), cwd=copied)
    assert weights.stat().st_ino != linked.st_ino and weights.stat().st_mode & 0o200
    assert "up to date" in dvc(copied, "status")
    cached = [item for item in (copied / ".dvc" / "cache" / "files" / "md5").glob("*/*") if item.suffix != ".dir"]
    assert len(cached) > 50
    for item in cached:
        assert hashlib.md5(item.read_bytes()).hexdigest() == item.parent.name + item.name


def test_two_queued_experiments_run_at_a_time_and_outlive_their_copies(
    repo: Path, empty_store: Path, tmp_path: Path
) -> None:
    import mlflow

    copied = tmp_path / "repo"
    shutil.copytree(repo, copied, symlinks=True, ignore=shutil.ignore_patterns("runs"))
    (copied / ".state").mkdir()
    shutil.copy(empty_store, copied / ".state" / "mlflow.db")
    # nothing tells a stage where its state lies: it has to find that it works in a copy of this repository
    told = ("MEMPO_STATE", "MLFLOW_TRACKING_URI", "PREFECT_HOME", "MEMPO_PREFECT_API_URL")
    own = {name: value for name, value in environment().items() if name not in told}

    def queue(*arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        done = subprocess.run(command, cwd=copied, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for rate in ("0.002", "0.003"):
        settings = ["-S", f"optim.learning_rate={rate}", "-S", "loop.num_rounds=1", "-S", "diagnose.every=0"]
        queue("exp", "run", "--queue", "--name", f"rate-{rate}", *settings, "train@grpo")
    queue("queue", "start", "--jobs", "2")
    deadline = time.monotonic() + 500
    while (state := queue("queue", "status")).count("Success") < 2:
        assert "Failed" not in state and time.monotonic() < deadline, state
        time.sleep(1)
    assert not list((copied / ".dvc" / "tmp" / "exps").glob("tmp*"))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{copied}/.state/mlflow.db")
    runs = client.search_runs([client.search_experiments(filter_string="name = 'mempo'")[0].experiment_id])
    assert sorted(found.data.params["optim.learning_rate"] for found in runs) == ["0.002", "0.003"]
    for found in runs:
        assert found.info.status == "FINISHED" and "em" in found.data.metrics
        artifacts = Path(unquote(urlsplit(found.info.artifact_uri).path))
        assert artifacts.is_relative_to(copied / ".state") and (artifacts / "mem_reward_box.png").stat().st_size > 1000
    queue("exp", "apply", "rate-0.003")
    made = storage.read_json(copied / "results" / "grpo" / "config.json")
    assert made["config"]["optim"]["learning_rate"] == 0.003

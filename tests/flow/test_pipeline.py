"""The whole pipeline in small, with real Prefect, MLflow and models: every stage, kill -9 and resume, tracking."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mlflow
import pandas as pd
import pytest

from mempo import storage
from mempo.records import Sample, TurnScore
from mempo.storage import read_records
from tasks.chart_view import SECTIONS
from tasks.pages import SHOWN
from tests.flow.small import PARAMS, environment, here, killed, mempo, tracked_runs

pytestmark = [pytest.mark.slow, pytest.mark.server]


def train(root: Path, name: str = "mempo", *arguments: str) -> None:
    here(root, "train", name, *arguments)


@pytest.fixture(scope="module")
def warm(services: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with data and a warm-started policy that knows the turn format."""
    root = tmp_path_factory.mktemp("warm")
    (root / "params.yaml").write_text(PARAMS)
    here(root, "prepare")
    here(root, "warmstart")
    return root


def copy_of(warm: Path, root: Path) -> Path:
    shutil.copytree(warm, root)
    return root


def weights(root: Path, name: str = "mempo") -> bytes:
    return (root / "checkpoints" / name / "final" / "model.safetensors").read_bytes()


def rounds_of(root: Path) -> list[Path]:
    return sorted(root.glob("runs/mempo-*/round_*"))


@pytest.fixture(scope="module")
def straight(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six rounds without a break."""
    root = copy_of(warm, tmp_path_factory.mktemp("straight") / "w")
    train(root)
    return root


def test_training_learns_something_and_leaves_what_dvc_keeps(straight: Path, warm: Path):
    start = (warm / "checkpoints" / "warmstart" / "final" / "model.safetensors").read_bytes()
    assert weights(straight) != start
    samples = [sample for folder in rounds_of(straight) for sample in read_records(folder / "samples.parquet", Sample)]
    assert any(sample.outcome_advantage for sample in samples)
    assert any(any(sample.memory_advantages) for sample in samples)
    rounds = pd.read_parquet(straight / "results" / "mempo" / "rounds.parquet")
    assert rounds["round"].tolist() == list(range(6))
    assert rounds["dev/em_greedy"].notna().sum() == 2
    assert rounds["num_steps"].eq(2).all()
    # the sampler's log-probs are the trainer's: no drift before the first step but that of docs/engines.md
    assert rounds["mismatch/ratio_max"].max() < 1 + 1e-3 and rounds["mismatch/kl"].max() < 1e-8
    assert (straight / "checkpoints" / "mempo" / "best" / "config.json").exists()


def test_three_rounds_kill_and_three_more_are_six_rounds(straight: Path, warm: Path, services: Path, tmp_path: Path):
    """SIGKILL in mid-round, whatever the process is doing by then; tests/crash has the other moments."""
    root = copy_of(warm, tmp_path / "w")
    killed(mempo(root, "train", "mempo"), lambda: list(root.glob("runs/mempo-*/round_0003/rollouts.parquet")))
    finished = {path: path.stat().st_mtime_ns for folder in rounds_of(root)[:3] for path in folder.glob("*.parquet")}
    train(root)
    assert weights(root) == weights(straight)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished  # what was whole was not made again
    assert len(rounds_of(root)) == 6
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{services}/mlflow.db")
    (tracked,) = tracked_runs(client, next(root.glob("runs/mempo-*")))
    assert tracked.info.status == "FINISHED"
    points = client.get_metric_history(tracked.info.run_id, "mem_reward/n")
    assert [point.step for point in points] == list(range(6))


def test_a_finished_training_run_again_changes_nothing(straight: Path):
    before = {path: path.stat().st_mtime_ns for folder in rounds_of(straight) for path in folder.iterdir()}
    train(straight)
    assert {path: path.stat().st_mtime_ns for folder in rounds_of(straight) for path in folder.iterdir()} == before


def test_a_deleted_round_is_made_again(straight: Path, tmp_path: Path):
    root = copy_of(straight, tmp_path / "w")
    last = rounds_of(root)[-1]
    shutil.rmtree(last)
    train(root)
    assert (last / "rollouts.parquet").exists() and weights(root) == weights(straight)


def test_every_chart_of_the_prebuilt_view_has_its_metric(straight: Path):
    logged = pd.read_parquet(straight / "results" / "mempo" / "rounds.parquet")
    charted = [metric for _, charts in SECTIONS.values() for chart in charts for metric in chart]
    assert set(charted) | set(SHOWN) <= set(logged.columns[logged.notna().any()])


def test_fewer_rounds_and_other_checks_after_a_longer_run(straight: Path, tmp_path: Path):
    """Policies that the longer run pruned are made again, and going back to it changes nothing."""
    root = copy_of(straight, tmp_path / "w")
    train(root, "mempo", "--set", "loop.num_rounds=3", "--set", "loop.dev_every=2", "--set", "loop.keep_every=2")
    assert weights(root) != weights(straight)
    rounds = pd.read_parquet(root / "results" / "mempo" / "rounds.parquet")
    assert rounds["dev/em_greedy"].notna().tolist() == [False, True, True]  # round 2 was checked by the longer run
    assert (root / "checkpoints" / "mempo" / "round_0002" / "model.safetensors").exists()
    train(root)
    assert weights(root) == weights(straight)


def test_more_rounds_go_on_in_the_same_folder(straight: Path, tmp_path: Path):
    root = copy_of(straight, tmp_path / "w")
    train(root, "mempo", "--set", "loop.num_rounds=7")
    assert len(rounds_of(root)) == 7 and len(list(root.glob("runs/mempo-*"))) == 1


def test_evaluation_and_report(straight: Path, tmp_path: Path):
    root = copy_of(straight, tmp_path / "w")
    train(root, "grpo")
    train(root, "full_context")
    here(root, "evaluate")
    metrics = storage.read_json(root / "metrics" / "evaluation.json")
    assert set(metrics) == {"warmstart", "mempo", "grpo", "full_context"}
    assert metrics["mempo"]["num_questions"] == 8 and 0 <= metrics["mempo"]["format_rate"] <= 1
    here(root, "report")
    page = (root / "report" / "index.html").read_text()
    assert "full_context" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert set(storage.read_json(root / "metrics" / "train.json")) == {"mempo", "grpo", "full_context"}


def test_a_suite_is_answered_once_and_shown_everywhere(straight: Path, services: Path, tmp_path: Path):
    root = copy_of(straight, tmp_path / "w")
    told = here(root, "evaluate", "--suite", "far")
    assert "more: difference to memory" in told and "evaluation/far/index.html\n" in told
    rows = pd.read_parquet(root / "evaluation" / "far" / "rows.parquet")
    counted = rows.groupby(["policy", "dataset", "attempts"]).size().to_dict()
    assert counted == {
        (agent, dataset, attempts): questions * (2 if attempts == "sampled" else 1)
        for agent in ("memory", "recent")
        for dataset, questions in (("own", 3), ("more", 4))
        for attempts in ("sampled", "greedy")
    }
    assert "<img" in (root / "evaluation" / "far" / "index.html").read_text()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{services}/mlflow.db")
    experiment = client.get_experiment_by_name("mempo-evaluation")
    found = {found.info.run_name: found for found in client.search_runs([experiment.experiment_id])}
    assert set(found) == {f"{agent} on {dataset}" for agent in ("memory", "recent") for dataset in ("own", "more")}
    assert {one.info.status for one in found.values()} == {"FINISHED"}
    points = client.get_metric_history(found["memory on more"].info.run_id, "greedy/by_objectives/total_tokens")
    assert [point.step for point in points] == [1, 6]
    answered = {file: file.stat().st_mtime_ns for file in root.glob("runs/suites/far/*/rows.parquet")}
    here(root, "evaluate", "--suite", "far", "--set", "loop.num_rounds=7")  # nothing that an answer depends on
    assert {file: file.stat().st_mtime_ns for file in root.glob("runs/suites/far/*/rows.parquet")} == answered
    assert len(answered) == 4 and len(client.search_runs([experiment.experiment_id])) == 4


def test_stored_trajectories_are_scored_again_for_a_reward_that_needs_it(straight: Path, tmp_path: Path) -> None:
    root = copy_of(straight, tmp_path / "w")
    (folder,) = root.glob("runs/mempo-*")
    before = sorted(path.name for path in folder.iterdir())
    command = mempo(root, "rescore", str(folder), "--set", "scoring.lookahead=1")
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "scoring.lookahead: 1 needs other forward passes" in done.stderr
    here(root, "rescore", str(folder), "--set", "scoring.lookahead=1", "--score")
    (scored,) = folder.glob("rescored-*")
    assert len(list(scored.glob("round_*.parquet"))) == 6
    again = read_records(scored / "round_0003.parquet", TurnScore)
    stored = read_records(folder / "round_0003" / "scores.parquet", TurnScore)
    assert any(probe.ahead_logprobs for score in again for probe in score.probes)
    for ours, theirs in zip(stored, again, strict=True):
        # The policy that had been pruned was made again to the bit: the same question, the same log-probabilities.
        for mine, other in zip(ours.probes, theirs.probes, strict=True):
            assert other.full_logprobs == pytest.approx(mine.full_logprobs, abs=1e-5)
            assert other.mem_logprobs == pytest.approx(mine.mem_logprobs, abs=1e-5)
    assert sorted(path.name for path in folder.iterdir() if path != scored) == before

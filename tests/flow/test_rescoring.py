"""Stored trajectories under a setting that needs other passes: each round by its own policy, pruned ones made again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mempo import samples, storage
from mempo.config import Config
from mempo.engines.hf import HFEngine
from mempo.records import Trajectory, TurnScore
from mempo.runtime import Runtime
from mempo.scoring import score
from mempo.workspace import Run, Workspace
from tests.unit.test_scoring import FRANCE, THREE_TURNS, make_trajectory

RUNTIME = Runtime(num_threads=1)
QUESTIONS = {"france": FRANCE}
MADE = Config.model_validate(
    {
        "runtime": {"num_threads": 1},
        "optim": {"learning_rate": 1e-2, "minibatches": 1},
        "loss": {"max_mismatch": None},  # the trajectories' log-probs are made up
    }
)
ASKED = MADE.model_copy(update={"scoring": MADE.scoring.model_copy(update={"baseline": "seen", "lookahead": 1})})


def write_round(run: Run, index: int, trajectories: list[Trajectory], engine: HFEngine) -> None:
    folder = run.round(index)
    scores = score(engine, trajectories, QUESTIONS, MADE)
    built, table = samples.build(trajectories, QUESTIONS, scores, MADE, round_index=index)
    for name, records in {"rollouts": trajectories, "scores": scores, "samples": built, "rewards": table}.items():
        storage.write_records(folder / f"{name}.parquet", records)
    storage.write_records(folder / "questions.parquet", [FRANCE])
    storage.write_json(folder / "advantage.json", {})


@pytest.fixture
def run(tmp_path: Path, tiny_policy: Path, tiny_tokenizer: Any) -> Run:
    """Two rounds; policy 1 was pruned after it had sampled round 1."""
    from tasks.round import remake

    workspace = Workspace(tmp_path)
    shutil.copytree(tiny_policy, workspace.checkpoint("warmstart"))
    inputs = {"warmstart": storage.content_hash(workspace.checkpoint("warmstart"))}
    made = workspace.run("mempo", MADE, inputs)
    answers = ("Paris; Yen", "Rome")
    first = [replace(make_trajectory(tiny_tokenizer, FRANCE, i, THREE_TURNS), answer=a) for i, a in enumerate(answers)]
    write_round(made, 0, first, HFEngine(made.policy(0), RUNTIME))
    second = [replace(trajectory, policy_version=1) for trajectory in first]
    write_round(made, 1, second, HFEngine(remake(made, 1), RUNTIME))
    shutil.rmtree(made.policy(1))
    return made


def test_each_round_by_the_policy_that_sampled_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import rescoring
    from tasks.round import remake

    folder = rescoring.score_again(run, ASKED)
    assert not list(run.folder.glob("policy_*")), "a policy that was made again leaves"
    found = [storage.read_records(folder / f"round_000{i}.parquet", TurnScore) for i in (0, 1)]
    for index, policy in enumerate([run.policy(0), remake(run, 1)]):
        trajectories = storage.read_records(run.round(index) / "rollouts.parquet", Trajectory)
        assert found[index] == score(HFEngine(policy, RUNTIME), trajectories, QUESTIONS, ASKED)
    assert found[0][1].probes[0].full_logprobs != found[1][1].probes[0].full_logprobs
    # Done is done; a lost round is made again alone.
    (folder / "round_0001.parquet").unlink()
    before = (folder / "round_0000.parquet").stat().st_mtime_ns
    assert rescoring.score_again(run, ASKED) == folder
    assert (folder / "round_0000.parquet").stat().st_mtime_ns == before
    assert storage.read_records(folder / "round_0001.parquet", TurnScore) == found[1]
    monkeypatch.setattr(rescoring, "engines", None)
    rescoring.score_again(run, ASKED)  # opens no model


def test_another_warm_start_is_refused(run: Run) -> None:
    from tasks.rescoring import score_again

    (run.policy(0) / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="not the policy that"):
        score_again(run, ASKED)

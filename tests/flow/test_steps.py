"""Single steps of a run without a server: what they do when files are not as the last run left them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.states import Failed

from mempo import rollout, storage
from mempo.config import Config
from mempo.evaluation import EvaluationRow
from mempo.mismatch import Mismatch
from mempo.records import Sample
from mempo.workspace import Run, Workspace
from tasks import diagnose as diagnosing, evaluation, round as steps
from tests.tiny import make_policy
from tests.unit.builders import question
from tests.unit.test_scoring import FRANCE, JAPAN, NO_MEMORY, THREE_TURNS, make_trajectory


@pytest.fixture
def run(tiny_policy: Path, tmp_path: Path) -> Run:
    """Three rounds of which nothing but the samples is left."""
    workspace = Workspace(tmp_path)
    shutil.copytree(tiny_policy, workspace.checkpoint("warmstart"))
    sections = {"optim": {"learning_rate": 1e-3}, "loss": {"max_mismatch": None}}  # made-up log-probs, see below
    made = workspace.run("mempo", Config.model_validate(sections), {})
    for index in range(3):
        ids = [5 + index, 20, 30 + index, 40]
        samples = [
            Sample(f"q/{i}/1", ids, [0, 0, 1, 1], [0.0, 0.0, -3.0, -3.0], [0.0] * 4, sign, [0.0] * 4, 0.25)
            for i, sign in enumerate((1.0, -1.0))
        ]
        storage.write_records(made.round(index) / "samples.parquet", samples)
    return made


def test_a_pruned_policy_is_made_again_to_the_bit(run: Run) -> None:
    """After the kill of a folder, a shorter run, other rounds to check: the same updates from the nearest one left."""
    first = {version: storage.content_hash(steps.remake(run, version)) for version in (1, 2, 3)}
    assert len(set(first.values())) == 3
    for gone in ((3,), (2, 3), (1, 2), (1, 2, 3)):
        for version in gone:
            shutil.rmtree(run.policy(version))
        for version in gone:
            assert storage.content_hash(steps.remake(run, version)) == first[version]
    assert steps.remake(run, 0) == run.workspace.checkpoint("warmstart")


def test_more_questions_than_the_split_has_are_refused(run: Run) -> None:
    storage.write_records(run.workspace.data / "test.parquet", [question(str(i)) for i in range(3)])
    config = Config.model_validate({"evaluation": {"num_questions": 4}})
    with pytest.raises(ValueError, match=r"evaluation\.num_questions: test has 3, asked 4"):
        evaluation.evaluate_policy.fn(run.workspace, "warmstart", run.policy(0), config)


def test_evaluation_has_its_own_temperature_and_is_found_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    data = run.workspace.data
    storage.write_records(data / "test.parquet", [question(str(i)) for i in range(2)])
    (data / "corpus.jsonl").write_text('{"id": "1", "contents": "Ulm\\nUlm lies on the Danube."}\n')
    collected: list[tuple[float, bool]] = []

    async def collect(engine: Any, searcher: Any, questions: Any, config: Config, *, greedy: bool, **rest: Any) -> Any:
        collected.append((config.rollout.temperature, greedy))
        return await rollout.collect(engine, searcher, questions, config, greedy=greedy, **rest)

    monkeypatch.setattr(evaluation, "collect", collect)

    def rows(temperature: float) -> list[EvaluationRow]:
        asked = {"num_questions": 2, "temperature": temperature}
        config = Config.model_validate({"evaluation": asked, "rollout": {"max_response_tokens": 16}})
        return evaluation.evaluate_policy.fn(run.workspace, "warmstart", run.policy(0), config)

    hot = rows(1.0)
    rows(0.5)
    assert rows(1.0) == hot  # the third time from its file
    assert collected == [(1.0, False), (1.0, True), (0.5, False), (0.5, True)]


@pytest.mark.parametrize("name", ["rollouts.parquet", "questions.parquet"])
def test_a_half_written_file_stops_a_step_by_its_name(run: Run, name: str) -> None:
    storage.write_records(run.round(0) / "rollouts.parquet", [])
    storage.write_records(run.round(0) / "questions.parquet", [question()])
    path = run.round(0) / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=name):
        steps.advantage.fn(run, 0)
    assert not (run.round(0) / "advantage.json").exists()


def test_leftovers_of_killed_writes_are_no_data(run: Run) -> None:
    """The temporary files of ``storage`` are read by nothing, and the next write of the same name removes them."""
    (run.folder / ".config.json.0123456789ab.tmp").write_text('{"config": ')
    (run.folder / ".policy_0001.0123456789ab.tmp").mkdir()
    found = run.workspace.run("mempo", run.config, {})
    assert found.folder == run.folder and not run.policy(1).exists()
    steps.remake(run, 1)
    assert not (run.folder / ".policy_0001.0123456789ab.tmp").exists()


@pytest.mark.parametrize("mem_weight", [1.0, 0.0])
def test_controls_change_nothing_of_training(
    tiny_policy: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mem_weight: float
) -> None:
    """Two rounds of given trajectories, then rollouts of the trained policy: the same bits with controls as without."""
    monkeypatch.setattr(diagnosing, "_diagnose", diagnosing._diagnose.fn)
    monkeypatch.setattr(steps, "_update", steps._update.fn)
    left: dict[int, list[Any]] = {}
    for every in (0, 1):
        workspace = Workspace(tmp_path / str(every))
        shutil.copytree(tiny_policy, workspace.checkpoint("warmstart"))
        storage.write_records(workspace.data / "train.parquet", [FRANCE, JAPAN])
        (workspace.data / "corpus.jsonl").write_text('{"id": "1", "contents": "Ulm\\nUlm lies on the Danube."}\n')
        sections = {
            "diagnose": {"every": every},
            "advantage": {"mem_weight": mem_weight},
            "mem_reward": {"mask": "none"},  # so poor a policy's probes clear no threshold
            "loop": {"questions_per_round": 2, "group_size": 2},
            "rollout": {"max_response_tokens": 16},
            "optim": {"learning_rate": 1e-3},
            "loss": {"max_mismatch": None},  # the trajectories' log-probs are made up
        }
        run = workspace.run("mempo", Config.model_validate(sections), {})
        policy = run.policy(0)
        for index in range(2):
            storage.write_records(run.round(index) / "questions.parquet", [FRANCE, JAPAN])
            storage.write_records(
                run.round(index) / "rollouts.parquet",
                [
                    replace(make_trajectory(tiny_tokenizer, asked, i, texts), policy_version=index, answer=answer)
                    for asked in (FRANCE, JAPAN)
                    for i, (texts, answer) in enumerate(((THREE_TURNS, "Yen"), (NO_MEMORY, "Paris; Yen")))
                ],
            )
            steps.score.fn(run, index, policy)
            steps.advantage.fn(run, index)
            diagnosing.diagnose(run, index)
            policy = steps.update(run, index, policy)
        steps.rollout.fn(run, 2, policy)
        kept = [storage.content_hash(run.policy(version)) for version in (1, 2)]
        rollouts = storage.content_hash(run.round(2) / "rollouts.parquet")
        left[every] = [run.folder.name, *kept, rollouts, diagnosing.controls_table(run, 1).empty]
        made = (run.round(1) / "diagnose.json").exists()
        assert made == bool(every)
        if made:
            figures = storage.read_json(run.round(1) / "diagnose.json")["figures"]
            assert figures["own/n"] > 0
            assert ("gradient/cosine" in figures) == (mem_weight > 0)
    assert left[0] == [*left[1][:-1], True]
    assert not left[1][-1]


@pytest.mark.parametrize("old", ["sampler", "recomputed"])
def test_a_stale_sampler_stops_the_run_and_leaves_no_policy(
    tiny_policy: Path, tiny_tokenizer: Any, tmp_path: Path, old: str
) -> None:
    """Rollouts of other weights under the right version number, as an engine draws them that missed a reload."""
    stale = make_policy(tmp_path / "stale", tiny_tokenizer, seed=1)
    workspace = Workspace(tmp_path)
    shutil.copytree(tiny_policy, workspace.checkpoint("warmstart"))
    storage.write_records(workspace.data / "train.parquet", [FRANCE, JAPAN])
    (workspace.data / "corpus.jsonl").write_text('{"id": "1", "contents": "Ulm\\nUlm lies on the Danube."}\n')
    sections = {
        "loop": {"questions_per_round": 2, "group_size": 2},
        "rollout": {"max_response_tokens": 16},
        "loss": {"old_logprobs": old},
    }
    run = workspace.run("mempo", Config.model_validate(sections), {})

    def through(round_index: int, sampler: Path) -> Any:
        steps.rollout.fn(run, round_index, sampler)
        steps.score.fn(run, round_index, run.policy(0))
        steps.advantage.fn(run, round_index)
        steps._update.fn(run, round_index, run.policy(0))
        files = [run.round(round_index) / f"{name}.json" for name in ("advantage", "update")]
        return files[0].exists(), files[1].exists(), run.policy(round_index + 1).exists()

    with pytest.raises(Mismatch, match=r"^round 0: .*KL \d.*stale weights") as stopped:
        through(0, stale)
    assert not list(run.folder.glob("*policy_*"))
    assert (run.round(0) / "advantage.json").exists() == (old == "sampler")
    assert not (run.round(0) / "update.json").exists()
    assert not steps.is_transient(None, None, Failed(data=stopped.value))
    assert steps.is_transient(None, None, Failed(data=OSError("of the network")))

    assert through(1, run.policy(0)) == (True, True, True)
    step = "update" if old == "sampler" else "advantage"
    figures = storage.read_json(run.round(1) / f"{step}.json")["figures"]
    assert figures["mismatch/kl"] < 1e-8 and figures["mismatch/ratio_max"] < 1 + 1e-4


def test_controls_need_a_context_with_a_memory(run: Run) -> None:
    for rule in ("full", "none"):
        sections = {"rollout": {"context": rule}, "format": {"require_memory": False}, "advantage": {"mem_weight": 0.0}}
        config = Config.model_validate(sections)
        diagnosing.diagnose(replace(run, config=config), 0)
    assert not (run.round(0) / "diagnose.json").exists()

"""A round by transformers and torch, and the same round by vLLM and two DeepSpeed ranks: one policy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mempo import storage
from mempo.config import Config
from mempo.engines import Engine, open_engine
from mempo.packing import chain
from mempo.records import Trajectory, TurnScore
from mempo.runtime import Runtime
from mempo.workspace import Run, Workspace
from tasks import engines, round as steps
from tests.tiny import make_policy
from tests.unit.test_scoring import FRANCE, JAPAN, NO_MEMORY, THREE_TURNS, make_trajectory

pytest.importorskip("vllm")
pytest.importorskip("deepspeed")
PLAIN = {"engine": "hf", "trainer": "torch"}
TEMPERATURE = 0.8  # which vLLM samples at, and transformers recomputes at
HEAVY = {"engine": "vllm", "trainer": "deepspeed", "deepspeed": {"ranks": 2, "stage": 2}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Heads of 32, the narrowest that vLLM's attention takes on a CPU."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_policy(tmp_path_factory.mktemp("stacks") / "policy", tiny_tokenizer, **sizes)


@pytest.fixture(autouse=True)
def no_engine_is_left() -> Iterator[None]:
    yield
    engines.close()


def sampled_by(engine: Engine, trajectory: Trajectory) -> Trajectory:
    """The trajectory with the log-probs that the engine gives its tokens, as if it had drawn them."""
    trees = [chain([*turn.prompt_ids, *turn.response_ids], len(turn.prompt_ids)) for turn in trajectory.turns]
    turns = [
        replace(turn, sampling_logprobs=found)
        for turn, found in zip(trajectory.turns, engine.logprobs(trees, temperature=TEMPERATURE), strict=True)
    ]
    return replace(trajectory, turns=turns)


def started(folder: Path, policy: Path, runtime: dict[str, Any], trajectories: list[Trajectory]) -> Run:
    """A run whose first rollouts are given."""
    workspace = Workspace(folder)
    shutil.copytree(policy, workspace.checkpoint("warmstart"))
    storage.write_records(workspace.data / "train.parquet", [FRANCE, JAPAN])
    (workspace.data / "corpus.jsonl").write_text('{"id": "1", "contents": "Ulm\\nUlm lies on the Danube."}\n')
    sections = {
        "mem_reward": {"mask": "none"},  # so poor a policy's probes clear no threshold
        "loop": {"questions_per_round": 2, "group_size": 2},
        "rollout": {"max_response_tokens": 16, "temperature": TEMPERATURE},
        "loss": {"old_logprobs": "recomputed", "sampler_correction": "token"},
        "optim": {"learning_rate": 1e-4},
        "runtime": {"num_threads": 1, **runtime},
    }
    run = workspace.run("mempo", Config.model_validate(sections), {})
    storage.write_records(run.round(0) / "questions.parquet", [FRANCE, JAPAN])
    storage.write_records(run.round(0) / "rollouts.parquet", trajectories)
    return run


def finish_round(run: Run, index: int) -> dict[str, float]:
    """Score, advantage, update; the figures of the latter two."""
    steps.score.fn(run, index, run.policy(index))
    steps.advantage.fn(run, index)
    steps._update.fn(run, index, run.policy(index))
    figures: dict[str, float] = {}
    for step in ("advantage", "update"):
        figures |= storage.read_json(run.round(index) / f"{step}.json")["figures"]
    return figures


def probes(run: Run) -> list[float]:
    scores = storage.read_records(run.round(0) / "scores.parquet", TurnScore)
    return [value for s in scores for probe in s.probes for value in (*probe.full_logprobs, *probe.mem_logprobs)]


def test_both_stacks_make_the_same_policy_of_the_same_rollouts(
    policy: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    engine = open_engine(policy, Runtime(num_threads=1))
    trajectories = [
        sampled_by(engine, replace(make_trajectory(tiny_tokenizer, asked, i, texts), answer=answer))
        for asked in (FRANCE, JAPAN)
        for i, (texts, answer) in enumerate(((THREE_TURNS, "Yen"), (NO_MEMORY, "Paris; Yen")))
    ]
    runs = {name: started(tmp_path / name, policy, runtime, trajectories) for name, runtime in
            (("plain", PLAIN), ("heavy", HEAVY))}  # fmt: skip
    figures = {name: finish_round(run, 0) for name, run in runs.items()}
    assert probes(runs["heavy"]) == pytest.approx(probes(runs["plain"]), abs=1e-4)
    assert figures["heavy"]["loss"] == pytest.approx(figures["plain"]["loss"], abs=1e-4)

    before = load_file(policy / "model.safetensors")
    plain, heavy = (load_file(runs[name].policy(1) / "model.safetensors") for name in ("plain", "heavy"))
    assert plain.keys() == heavy.keys() == before.keys()
    for name, weight in plain.items():
        # 1e-4 is asked for, and two steps at this learning rate move no weight by more than 2e-4.
        assert float((heavy[name] - weight).abs().max()) < 1e-5, name
    assert any(float((weight - before[name]).abs().max()) > 1e-4 for name, weight in plain.items())

    # The next round is vLLM's own: it took DeepSpeed's policy in place, and its samples are that policy's.
    steps.rollout.fn(runs["heavy"], 1, runs["heavy"].policy(1))
    following = finish_round(runs["heavy"], 1)
    for pair in ("", "trainer_"):  # vLLM and transformers, transformers and DeepSpeed
        assert following[f"mismatch/{pair}kl"] < 1e-6
        assert following[f"mismatch/{pair}ratio_max"] < 1 + 1e-3
    assert following["mismatch/kl"] > 0  # two programs, not one asked twice

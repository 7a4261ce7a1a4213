"""What the memory reward costs: a round with it against the same round without it, phase by phase.

Policies ``mempo`` and ``grpo`` of params.yaml share the rollout, their seeds and their samples; what is added is
scoring, the memory side of the advantages, and whatever an update does with it. Opening and saving the policy and the
files of a round, equal for both, are left out, which makes the share larger than a training's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.rows import HERE, Row
from benchmarks.synthetic import decode, demo_policy, trajectories
from benchmarks.timing import timed
from mempo import data, rounds, storage
from mempo.config import Config
from mempo.engines import Engine, open_engine
from mempo.params import load_config
from mempo.records import Question, Sample, Trajectory, TurnScore
from mempo.rollout import collect
from mempo.samples import build
from mempo.scoring import score
from mempo.search import open_searcher
from mempo.trainers import open_trainer
from mempo.update import update

POLICIES, REPEATS, TURNS = ("grpo", "mempo"), 3, 4
Rollout = Callable[[], list[Trajectory]]
Phases = dict[str, float]


def run(folder: Path, full: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    configs = {name: load_config(HERE.parent / "params.yaml", policy=name) for name in POLICIES}
    trained = Path("checkpoints/warmstart/final")
    if trained.exists():
        engine, what = open_engine(trained, configs["mempo"].runtime), "the demo's warm start"
        rollout, questions = _asked(engine, configs["mempo"], folder / "data")
    else:  # one turn is all that an untrained policy makes of a question
        trained = demo_policy(folder / "policy")
        engine, what = (
            open_engine(trained, configs["mempo"].runtime),
            "drawn tokens, an untrained policy decodes as many",
        )
        configs = {name: _unchecked(config) for name, config in configs.items()}
        rollout, questions = _drawn(engine, configs["mempo"].loop.questions_per_round, configs["mempo"].loop.group_size)
    found: dict[str, list[Phases]] = {name: [] for name in POLICIES}
    decoding = []
    for _ in range(1 + REPEATS):  # the first of each does not count
        seconds, made = timed(rollout)
        decoding.append(seconds)
        learnt = {name: _learn(engine, trained, made, questions, config) for name, config in configs.items()}
        for name, (phases, _, _) in learnt.items():
            found[name].append(phases)
        memories = _agree(*((samples, scores) for _, samples, scores in learnt.values()))
    rollout_s = min(decoding[1:])
    without, added = ({p: min(row[p] for row in found[name][1:]) for p in found[name][0]} for name in POLICIES)
    base = rollout_s + sum(without.values())
    told = ", ".join(f"{phase} {seconds:.2f} against {without[phase]:.2f}" for phase, seconds in added.items())
    turns = sum(len(trajectory.turns) for trajectory in made) / len(made)
    detail = (
        f"CPU-s of `mempo` against `grpo`: rollout {rollout_s:.2f}, {told}; {len(made)} trajectories of {turns:.1f} "
        f"turns, {memories} scored memories, {what}"
    )
    yield Row("a round with the memory reward", (rollout_s + sum(added.values())) / base, "lower", detail, 1.15)


def _asked(engine: Engine, config: Config, folder: Path) -> tuple[Rollout, dict[str, Question]]:
    """The demo's first round, searched and all."""
    data.prepare(config.data, config.model, folder, [config.prompt.system, config.prompt.system_full])
    train = storage.read_records(folder / "train.parquet", Question)
    loop, searcher = config.loop, open_searcher(folder / "corpus.jsonl", config.search)
    asked = rounds.questions_of_round(train, 0, loop.questions_per_round, loop.seed)
    return (
        lambda: asyncio.run(collect(engine, searcher, asked, config, round_index=0, seed=loop.seed)),
        dict(rounds.by_question(asked)),
    )


def _drawn(engine: Engine, num_questions: int, group_size: int) -> tuple[Rollout, dict[str, Question]]:
    """Drawn trajectories; decoding as many tokens after their prompts is their rollout."""
    made, questions = trajectories(TURNS, num_questions, group_size, len(engine.tokenizer))

    def rollout() -> list[Trajectory]:
        decode(engine, made)
        return made

    return rollout, questions


def _unchecked(config: Config) -> Config:
    """Drawn tokens have log-probs that no sampler gave."""
    return config.model_copy(update={"loss": config.loss.model_copy(update={"max_mismatch": None})})


def _learn(
    engine: Engine, policy: Path, made: list[Trajectory], questions: Mapping[str, Question], config: Config
) -> tuple[Phases, list[Sample], list[TurnScore]]:
    """CPU-seconds of the steps after the rollout, as in flows/train.py, and what they came to."""
    scored_s, scores = timed(lambda: score(engine, made, questions, config))
    built_s, (samples, _) = timed(lambda: build(made, questions, scores, config, round_index=0))
    with closing(open_trainer(policy, config.optim, config.loss, config.runtime)) as trainer:
        update_s, _ = timed(lambda: update(trainer, samples, config, round_index=0))
    return {"score": scored_s, "advantage": built_s, "update": update_s}, samples, scores


def _agree(outcome: tuple[list[Sample], list[TurnScore]], memory: tuple[list[Sample], list[TurnScore]]) -> int:
    """How many memories were scored. Raises where none was, where some were without the reward, on other tokens."""
    tokens = [[(s.token_ids, s.loss_mask) for s in samples] for samples, _ in (outcome, memory)]
    if tokens[0] != tokens[1]:
        raise AssertionError("the policies train on different tokens")
    without, scored = (sum(bool(score.probes) for score in scores) for _, scores in (outcome, memory))
    if without or not scored:
        raise AssertionError(f"{scored} memories were scored with the reward, {without} without it")
    return scored

"""The steps of a round as Prefect tasks. A step whose ``<step>.json`` stands in the round's folder returns at once.

Each step writes its records first and ``<step>.json`` (figures and seconds) last: that file says that all is whole.
Any process that sees the run folder can go on where another was killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

from prefect import task

from mempo import diagnoses, evaluation, history, journal, rounds, samples, storage, update as updating
from mempo.console import progress
from mempo.data import Truth, read_truth
from mempo.proof import StaleWeights
from mempo.records import Question, Sample, Trajectory, TurnScore
from mempo.rescore import chains
from mempo.rollout import collect
from mempo.trainers import open_trainer
from mempo.workspace import Run
from tasks import engines, parts, shards
from tasks.parts import Figures, policy_engine, searcher_of

PROCESS = f"{os.getpid()}@{time.time():.3f}"


def is_transient(task: Any, run: Any, state: Any) -> bool:
    """Retry what may pass by itself (a tool, a file system); a wrong value or a missing file stays wrong."""
    try:
        state.result()
    except (ValueError, TypeError, KeyError, FileNotFoundError, FloatingPointError, StaleWeights, shards.ShardFailed):
        return False
    except Exception:
        return True
    return False


def step(function: Callable[..., Figures]) -> Callable[..., None]:
    """Make ``function(run, round_index, ...) -> figures`` a resumable task of the round."""
    name = function.__name__.strip("_")

    @task(name=name, task_run_name=f"{name} {{round_index}}", retries=2, retry_delay_seconds=2,
          retry_condition_fn=is_transient, persist_result=False)  # fmt: skip
    @wraps(function)
    def resumable(run: Run, round_index: int, *args: Any) -> None:
        done = run.round(round_index) / f"{name}.json"
        made_before = done.exists()
        if not made_before:
            started, clock, cpu = time.time(), time.perf_counter(), time.process_time()
            with journal.timed(name, round=round_index):
                figures = function(run, round_index, *args)
            cpu = time.process_time() - cpu + shards.cpu_seconds(run, round_index, name)
            times = {"seconds": time.perf_counter() - clock, "cpu_seconds": cpu}
            made = {"figures": figures, "started": started, "clock": clock, "process": PROCESS}
            storage.write_json(done, made | times)
        parts.tidy(run, round_index, name)  # of a step that is done too: a kill may have come between
        if not made_before:
            run.share.send(*run.files(round_index))

    return resumable


@step
def rollout(run: Run, round_index: int, policy: Path) -> Figures:
    """A group of trajectories for each question of the round."""
    loop, folder = run.config.loop, run.round(round_index)
    train = _questions(run.workspace.data, "train")
    for phase in loop.curriculum:  # one that cannot be served stops the first round, and not the two hundredth
        if round_index == 0 and phase.from_round < loop.num_rounds:
            rounds.questions_of_round(train, phase.from_round, loop.questions_per_round, loop.seed, loop.curriculum)
    questions = rounds.questions_of_round(train, round_index, loop.questions_per_round, loop.seed, loop.curriculum)
    storage.write_records(folder / "questions.parquet", questions)
    run.share.send(folder / "questions.parquet")
    trajectories = shards.records(run, round_index, policy, "rollout", Trajectory)
    storage.write_records(folder / "rollouts.parquet", trajectories)
    return rounds.rollout_figures(trajectories)


@step
def score(run: Run, round_index: int, policy: Path) -> Figures:
    """Log-probabilities of the answer given the memory and given everything, with the weights that wrote them."""
    scores = shards.records(run, round_index, policy, "score", TurnScore)
    storage.write_records(run.round(round_index) / "scores.parquet", scores)
    return rounds.score_figures(scores)


@step
def advantage(run: Run, round_index: int) -> Figures:
    """Outcome advantage on all response tokens, memory advantage on ``<mem>`` tokens; no model."""
    folder, config = run.round(round_index), run.config
    made = rounds.read_round(folder)
    mismatch = samples.mismatch(made.trajectories, made.scores, config, round_index=round_index)
    built, table = samples.build(made.trajectories, made.questions, made.scores, config, round_index=round_index)
    storage.write_records(folder / "rewards.parquet", table)
    storage.write_records(folder / "samples.parquet", built)
    answered = evaluation.rows(run.name, made.trajectories, made.questions, config, greedy=False)
    figures = {"em": evaluation.mean_em(answered), "mem_weight": config.advantage.weight_at(round_index)}
    diagnosed = diagnoses.figures(replace(made, table=table), config, chains(truth(run)))
    return figures | mismatch | rounds.reward_figures(table) | diagnosed


@step
def _update(run: Run, round_index: int, policy: Path) -> Figures:
    return shards.figures(run, round_index, "update", lambda: train_policy(run, round_index, policy))


def train_policy(run: Run, round_index: int, policy: Path) -> Figures:
    """Make the policy after ``round_index`` from the round's samples and the policy before."""
    config = run.config
    built = storage.read_records(run.round(round_index) / "samples.parquet", Sample)
    temperature, adapter = config.rollout.temperature, config.lora
    engines.sleep()
    opened = open_trainer(policy, config.optim, config.loss, config.runtime, temperature=temperature, adapter=adapter)
    with closing(opened) as trainer:
        with progress(f"{run.name} {round_index} update", config.optim.minibatches) as advance:
            figures = updating.update(trainer, built, config, round_index=round_index, progress=advance)
        trainer.save(run.policy(round_index + 1), policy_version=round_index + 1)
    run.share.send(run.policy(round_index + 1))
    return figures


def update(run: Run, round_index: int, policy: Path) -> Path:
    """One pass of clipped policy gradient over the round's samples; returns the folder of the next policy."""
    _update(run, round_index, policy)
    return run.policy(round_index + 1)


def remake(run: Run, version: int) -> Path:
    """The folder of policy ``version``; where it was pruned, its updates are made again from their rounds' samples.

    A longer run keeps few policies: a shorter one, or other rounds to check or to keep, may then need another.
    """
    first = version
    while first and not run.policy(first).exists():
        run.share.fetch(run.policy(first))
        first -= not run.policy(first).exists()
    for round_index in range(first, version):
        train_policy(run, round_index, run.policy(round_index))
    return run.policy(version)


@step
def _check(run: Run, round_index: int) -> Figures:
    return shards.figures(run, round_index, "check", lambda: check_policy(run, round_index))


def check_policy(run: Run, round_index: int) -> Figures:
    """Greedy exact match of the policy after ``round_index`` on the dev questions."""
    questions = _questions(run.workspace.data, "dev")
    with progress(f"{run.name} {round_index} dev", len(questions)) as advance:
        trajectories = asyncio.run(
            collect(
                policy_engine(remake(run, round_index + 1), run), searcher_of(run), questions, run.config,
                round_index=0, seed=run.config.evaluation.seed, greedy=True, samples=1, progress=advance,
            )
        )  # fmt: skip
    answered = evaluation.rows(run.name, trajectories, rounds.by_question(questions), run.config, greedy=True)
    return {"em_greedy": evaluation.mean_em(answered)}


def check(run: Run, round_index: int) -> None:
    """Greedy exact match on the dev questions, every ``loop.dev_every`` rounds and never on the test questions."""
    if "check" in history.steps_of(run.config, round_index):
        _check(run, round_index)


def truth(run: Run) -> dict[str, list[Truth]]:
    """The facts behind the dataset's questions; empty where it does not know them."""
    return _truth(run.workspace.data / "truth.parquet")


_truth = cache(read_truth)


@cache
def _questions(data: Path, split: str) -> list[Question]:
    return storage.read_records(data / f"{split}.parquet", Question)

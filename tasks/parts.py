"""A round's rollout and scoring in parts: whole blocks of questions, so no result depends on who makes which.

A part is made once. ``parts/<phase>_<first>-<end>.json`` says that it is whole, by whom it was made and how fast; its
records lie beside it until the round's step has put all of them together.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, Literal

from mempo import rounds, scoring, storage
from mempo.config import Config
from mempo.console import progress
from mempo.engines import Engine
from mempo.records import Question, Trajectory, TurnScore
from mempo.rollout import collect
from mempo.search import Searcher, open_searcher
from mempo.workspace import Run
from tasks import engines

Phase = Literal["rollout", "score", "update", "check", "diagnose"]
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """The questions ``[first, end)`` of a round under ``phase``; phases of records that cannot be cut are one part."""

    phase: Phase
    first: int
    end: int

    def made(self, run: Run, round_index: int) -> Path:
        """The file that says that the part is whole."""
        return run.round(round_index) / "parts" / f"{self.phase}_{self.first:04d}-{self.end:04d}.json"

    def records(self, run: Run, round_index: int) -> Path:
        return self.made(run, round_index).with_suffix(".parquet")


def split(phase: Phase, config: Config) -> list[Part]:
    """For engine ``hf`` blocks of ``rollout.block_questions``: they decide its batches, and with them its bits.

    vLLM forms its batches by itself, and gets as many questions at once as there are for a shard.
    """
    count, size = config.loop.questions_per_round, config.rollout.block_questions
    if phase not in MAKERS:
        size = count
    elif config.runtime.engine == "vllm":
        size = ceil(count / config.shards.count) if config.shards.deployment else count
    return [Part(phase, first, min(first + size, count)) for first in range(0, count, size)]


def shares(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """At most ``count`` runs of neighbouring parts, their numbers of parts as equal as can be."""
    count = min(count, len(parts))
    cuts = [len(parts) * index // count for index in range(count + 1)]
    return [list(parts[first:end]) for first, end in pairwise(cuts)]


def missing(run: Run, round_index: int, parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if not part.made(run, round_index).exists()]


def make(run: Run, round_index: int, policy: Path, parts: Sequence[Part]) -> None:
    """Those of ``parts``, all of one phase of rollout and score, that are missing, one after another."""
    if not (left := missing(run, round_index, parts)):
        return
    with closing(MAKERS[left[0].phase](run, round_index, policy, left)) as made:
        for part in left:
            with signed(part, run, round_index):
                storage.write_records(part.records(run, round_index), next(made))


@contextmanager
def signed(part: Part, run: Run, round_index: int) -> Iterator[Figures]:
    """Sign a part once the block under ``with`` has made it; the block may leave figures."""
    figures: Figures = {}
    clock, cpu = time.perf_counter(), time.process_time()
    yield figures
    times = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu}
    made = {"figures": figures, "by": f"{platform.node()}/{os.getpid()}", **times}
    storage.write_json(part.made(run, round_index), made)


def gathered(run: Run, round_index: int, phase: Phase, cls: type) -> list[Any]:
    """The records of all parts in the order of the questions."""
    parts = split(phase, run.config)
    return [row for part in parts for row in storage.read_records(part.records(run, round_index), cls)]


def tidy(run: Run, round_index: int, phase: str) -> None:
    """Remove the parts of a phase that stands in files of the round's own."""
    folder = run.round(round_index) / "parts"
    for file in folder.glob(f"{phase}_*"):
        run.share.drop(file)
        file.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _rollouts(run: Run, round_index: int, policy: Path, parts: Sequence[Part]) -> Generator[list[Trajectory]]:
    """A group of trajectories for each question."""
    loop, folder = run.config.loop, run.round(round_index)
    questions = storage.read_records(folder / "questions.parquet", Question)
    engine, searcher = policy_engine(policy, run), searcher_of(run)
    total, done = sum(part.end - part.first for part in parts) * loop.group_size, 0
    with progress(f"{run.name} {round_index} rollout", total) as advance:
        for part in parts:
            chosen = questions[part.first : part.end]
            told = _after(done, advance)
            yield asyncio.run(
                collect(engine, searcher, chosen, run.config, round_index=round_index, seed=loop.seed, progress=told)
            )
            done += len(chosen) * loop.group_size


def _after(before: int, advance: Callable[..., None]) -> Callable[..., None]:
    return lambda done, **figures: advance(before + done, **figures)


def _scores(run: Run, round_index: int, policy: Path, parts: Sequence[Part]) -> Generator[list[TurnScore]]:
    """Log-probs of the answer after everything and after the memory, with the weights that wrote the memories."""
    made = rounds.read_round(run.round(round_index))
    names = list(made.questions)
    for part in parts:
        chosen = set(names[part.first : part.end])
        attempts = [trajectory for trajectory in made.trajectories if trajectory.question_id in chosen]
        yield scored(run, policy, attempts, made.questions, run.config)


def scored(
    run: Run, policy: Path, attempts: Sequence[Trajectory], questions: Mapping[str, Question], config: Config
) -> list[TurnScore]:
    """``scoring.score`` with ``policy``, and with the run's first one where ``config`` needs a reference."""
    engine, reference = engines.engine_of(policy, config.runtime), None
    if scoring.needs_reference(config):
        reference = engines.reference(policy, run.policy(0), config.runtime)
    actor = engines.actor(policy, config.runtime)
    return scoring.score(engine, attempts, questions, config, reference=reference, actor=actor)


MAKERS = {"rollout": _rollouts, "score": _scores}


def policy_engine(policy: Path, run: Run) -> Engine:
    """The rounds of a run share one engine; the next policy replaces the one that it runs."""
    return engines.engine_of(policy, run.config.runtime)


def searcher_of(run: Run) -> Searcher:
    return open_searcher(run.workspace.data / "corpus.jsonl", run.config.search)

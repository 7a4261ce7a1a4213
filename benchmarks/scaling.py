"""How the time of each phase grows with a round: the exponent of a power law through four sizes; 1 is a straight line.

Drawn trajectories under the context rule ``memory``, an untrained policy in the demo's sizes, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.rows import Row
from benchmarks.synthetic import QUESTION, decode, demo_policy, trajectories
from benchmarks.timing import side_by_side
from mempo.config import Config
from mempo.engines import Engine, open_engine
from mempo.records import Question, Trajectory
from mempo.runtime import Runtime
from mempo.samples import build
from mempo.scoring import score
from mempo.trainers import Trainer, open_trainer

# What grows -> its sizes; the others stay as in BASE. ``context``: tokens of a question, with which each prompt begins.
FACTORS = {
    "questions": (2, 4, 8, 16),
    "group size": (4, 8, 16, 32),
    "turns": (2, 4, 8, 16),
    "context": (128, 256, 512, 1024),
}
BASE = {"questions": 2, "group size": 4, "turns": 4, "context": QUESTION}
SHORT = (("score", "turns"),)  # scoring reads whole histories: the one that could be a square
# What a phase's time follows in a size, where it is not the size: the first turn has no memory to score, and what
# comes after the last one's history is not read.
FOLLOWED = {("score", "turns"): ("turns with a memory", -1)}
Action = Callable[[], object]


def run(folder: Path, full: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    policy = demo_policy(folder)
    engine, config = open_engine(policy, Runtime()), Config()
    with closing(open_trainer(policy, config.optim, config.loss, Runtime())) as trainer:
        for factor, sizes in FACTORS.items():
            wanted = [p for p in ("rollout", "score", "update") if full or (p, factor) in SHORT]
            points = [phases(engine, trainer, config, BASE | {factor: size}) for size in sizes if wanted]
            for phase in wanted:
                seconds = side_by_side(*(point[phase] for point in points), repeats=2)
                what, more = FOLLOWED.get((phase, factor), (factor, 0))
                followed, told = [size + more for size in sizes], ", ".join(f"{s:.2f}" for s in seconds)
                detail = f"{told} CPU-s at {', '.join(map(str, followed))} {what}; 1 is a straight line"
                yield Row(f"{phase} against {what}", exponent(followed, seconds), "lower", detail, 1.1, "power")


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """k of seconds = c sizes^k, by least squares in the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def phases(engine: Engine, trainer: Trainer, config: Config, sizes: dict[str, int]) -> dict[str, Action]:
    """Of a round of these sizes, see ``FACTORS``."""
    made, questions = trajectories(
        sizes["turns"], sizes["questions"], sizes["group size"], len(engine.tokenizer), question=sizes["context"]
    )
    samples, _ = build(made, questions, score(engine, made, questions, config), config, round_index=0)
    return {
        "rollout": lambda: decode(engine, made),
        "score": lambda: _score(engine, made, questions, config),
        "update": lambda: trainer.step(samples),
    }


def _score(engine: Engine, made: list[Trajectory], questions: dict[str, Question], config: Config) -> None:
    scores = score(engine, made, questions, config)
    if unscored := [s.turn for s in scores if s.turn > 1 and s.reason]:
        raise AssertionError(f"{len(unscored)} memories were not scored")

"""The update on one rank and on two: the trainer ``deepspeed`` over the same samples, one thread a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.rows import Row, Skipped
from benchmarks.synthetic import demo_policy
from benchmarks.timing import side_by_side
from benchmarks.update import BUDGET, NUM_SAMPLES, PROMPTS, RESPONSE, draw
from mempo.config import LossConfig, Model, Optim
from mempo.records import Sample
from mempo.runtime import DeepSpeed, Runtime
from mempo.trainers import Trainer, open_trainer

OPTIM = Optim(tokens_per_microbatch=BUDGET)


def run(folder: Path, full: bool) -> Iterator[Row]:
    if not full:
        raise Skipped("a part of --full")
    if find_spec("deepspeed") is None:
        raise Skipped("deepspeed is not installed")
    if len(os.sched_getaffinity(0)) < 2:
        raise Skipped("two ranks need two cores")
    policy = demo_policy(folder)
    drawn = draw(Model().vocab_size, NUM_SAMPLES, PROMPTS, RESPONSE)
    with ExitStack() as stack:
        trainers = [stack.enter_context(closing(_opened(policy, ranks))) for ranks in (1, 2)]
        _agree(trainers, drawn, folder)
        one, two = side_by_side(*(partial(trainer.step, drawn) for trainer in trainers), clock=time.perf_counter)
    tokens = sum(len(sample.token_ids) for sample in drawn)
    stage = Runtime().deepspeed.stage
    detail = f"{two:.2f} s on the clock against {one:.2f} of one; {tokens:,} tokens, ZeRO stage {stage}, gloo"
    yield Row("update, two ranks against one, speed", one / two, "higher", detail)


def _opened(policy: Path, ranks: int) -> Trainer:
    runtime = Runtime(trainer="deepspeed", deepspeed=DeepSpeed(ranks=ranks))
    return open_trainer(policy, OPTIM, LossConfig(), runtime)


def _agree(trainers: Sequence[Trainer], drawn: Sequence[Sample], folder: Path) -> None:
    """A step of each: no weight differs by a tenth of it (as in tests/contract), or their times say nothing."""
    made = []
    for ranks, trainer in enumerate(trainers, start=1):
        trainer.step(drawn)
        trainer.save(folder / f"ranks-{ranks}", policy_version=1)
        made.append(load_file(folder / f"ranks-{ranks}" / "model.safetensors"))
    one, two = made
    worst = max(float((value - two[name]).abs().max()) for name, value in one.items())
    if one.keys() != two.keys() or worst > OPTIM.learning_rate / 10:
        raise AssertionError(f"weights of one rank and of two differ by {worst:.2g}")

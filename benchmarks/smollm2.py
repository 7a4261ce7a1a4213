"""How near phases come to their floor in SmolLM2-135M's sizes: what ``mempo plan`` reckons with (mempo/floor.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.rows import Row
from benchmarks.scoring import score_trees
from benchmarks.synthetic import QUESTION, RESPONSE, SMOLLM2, decode, random_policy, trajectories
from benchmarks.timing import side_by_side
from benchmarks.update import draw
from mempo.config import Config, LossConfig, Model, Optim
from mempo.cost import Phase, product_flops
from mempo.engines import Engine, open_engine
from mempo.floor import Device, measure
from mempo.footprint import kv_bytes, number_size
from mempo.runtime import Runtime
from mempo.shapes import Shape, num_parameters, shape_of
from mempo.trainers import open_trainer

TURNS, GROUP_SIZE = 6, 4
SAMPLES, PROMPT = 4, 110  # of an update: one micro-batch


def run(folder: Path, full: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    policy = random_policy(folder, SMOLLM2)
    engine, shape, device = (
        open_engine(policy, Runtime()),
        shape_of(Model(path=str(policy))),
        measure(clock=time.process_time),
    )
    yield _scoring(engine, shape, device, 2 if full else 1)
    yield _decoding(engine, shape, device)
    engine.close()
    yield _update(policy, shape, device)


def _scoring(engine: Engine, shape: Shape, device: Device, num_questions: int) -> Row:
    made, questions = trajectories(TURNS, num_questions, GROUP_SIZE, len(engine.tokenizer) - 1)
    trees = score_trees(engine, made, questions, Config())
    smallest = min(trees, key=len)
    (packed,), (padded,) = (engine.logprobs([smallest], mode=mode) for mode in ("packed", "padded"))
    if (worst := max(abs(a - b) for a, b in zip(packed, padded, strict=True))) > 1e-3:
        raise AssertionError(f"packed and padded differ by {worst:.2g}")
    (seconds,) = side_by_side(lambda: engine.logprobs(trees), repeats=2)
    held, answers = sum(len(tree.read()) for tree in trees), sum(len(tree.targets) for tree in trees)
    told = f"{held:,} tokens of {len(made)} trajectories of {TURNS} turns, {answers} of them scored"
    return _row(Phase("scoring", 1, product_flops(shape, held, answers), 0.0), device, seconds, told, 60.0)


def _decoding(engine: Engine, shape: Shape, device: Device) -> Row:
    """A group's first turn: a short question, read once."""
    made, _ = trajectories(1, 1, GROUP_SIZE, len(engine.tokenizer) - 1)
    (seconds,) = side_by_side(lambda: decode(engine, made), repeats=2)
    tokens = RESPONSE * len(made)
    cache = tokens * (QUESTION + RESPONSE / 2) * kv_bytes(shape, Runtime())
    moved = RESPONSE * float(num_parameters(shape) * number_size(Runtime())) + cache
    told = f"{RESPONSE} steps of {len(made)} rows"
    return _row(Phase("decoding", 1, product_flops(shape, tokens, tokens), moved), device, seconds, told)


def _update(policy: Path, shape: Shape, device: Device) -> Row:
    drawn = draw(shape.vocab, SAMPLES, (PROMPT, PROMPT), RESPONSE)
    with closing(open_trainer(policy, Optim(), LossConfig(), Runtime())) as trainer:
        (seconds,) = side_by_side(lambda: trainer.step(drawn), repeats=2)
    tokens, learnt = SAMPLES * (PROMPT + RESPONSE), SAMPLES * RESPONSE
    told = f"{tokens} tokens in one micro-batch, {learnt} of them learnt"
    return _row(Phase("update", 1, 3 * product_flops(shape, tokens, learnt), 0.0), device, seconds, told)


def _row(phase: Phase, device: Device, seconds: float, told: str, target: float | None = None) -> Row:
    floor = device.floor(phase)
    rates = f"{device.flop_rate / 1e9:.0f} GFLOP/s and {device.bandwidth / 1e9:.1f} GB/s"
    detail = f"{floor:.1f} s at {rates} (bound by {device.bound(phase)}), {seconds:.1f} measured; {told}"
    name = f"{phase.name}, share of the floor, SmolLM2-135M's sizes"
    return Row(name, 100 * floor / seconds, "higher", detail, target, "%")

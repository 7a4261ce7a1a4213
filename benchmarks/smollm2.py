"""Scoring in the sizes of SmolLM2-135M: how near the packed pass comes to the time of its matrix products alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.rows import Row
from benchmarks.scoring import score_trees
from benchmarks.synthetic import SMOLLM2, random_policy, trajectories
from benchmarks.timing import side_by_side
from mempo.config import Config, Model
from mempo.engines import open_engine
from mempo.floor import measure, product_flops
from mempo.runtime import Runtime
from mempo.shapes import shape_of

TURNS, GROUP_SIZE = 6, 4


def run(folder: Path, full: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    policy = random_policy(folder, SMOLLM2)
    engine = open_engine(policy, Runtime())
    made, questions = trajectories(TURNS, 2 if full else 1, GROUP_SIZE, len(engine.tokenizer) - 1)
    trees = score_trees(engine, made, questions, Config())
    smallest = min(trees, key=len)
    (packed,), (padded,) = (engine.logprobs([smallest], mode=mode) for mode in ("packed", "padded"))
    if (worst := max(abs(a - b) for a, b in zip(packed, padded, strict=True))) > 1e-3:
        raise AssertionError(f"packed and padded differ by {worst:.2g}")
    machine = measure()
    (seconds,) = side_by_side(lambda: engine.logprobs(trees), repeats=2)
    held, answers = sum(map(len, trees)), sum(len(tree.targets) for tree in trees)
    floor = product_flops(shape_of(Model(path=str(policy))), held, answers) / machine.flop_rate
    told = f"{floor:.1f} s of matrix products at {machine.flop_rate / 1e9:.0f} GFLOP/s, {seconds:.1f} measured"
    detail = f"{told}; {held:,} tokens of {len(made)} trajectories of {TURNS} turns, {answers} of them scored"
    yield Row("scoring, share of the floor, SmolLM2-135M's sizes", 100 * floor / seconds, "higher", detail, 60.0, "%")

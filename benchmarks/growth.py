"""How the memory of each phase grows with a round: the exponent of its peak; 0 is a bound, 1 a straight line.

The rounds of ``scaling``. Each phase runs in a fork of this process, whose peak less what lies there before is told:
weights, moments and what the first calls leave for good are no part of it. The exponent is that of the two largest
sizes, where buffers of a fixed size weigh least.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from benchmarks.memory import MIB, high_water
from benchmarks.rows import Row, Skipped
from benchmarks.scaling import BASE, FACTORS, Action, exponent, phases
from benchmarks.synthetic import demo_policy
from mempo.config import Config
from mempo.engines import open_engine
from mempo.runtime import Runtime
from mempo.trainers import open_trainer


def run(folder: Path, full: bool) -> Iterator[Row]:
    if not full:
        raise Skipped("a part of --full")
    torch.set_num_threads(1)
    policy = demo_policy(folder)
    engine, config = open_engine(policy, Runtime()), Config()
    with closing(open_trainer(policy, config.optim, config.loss, Runtime())) as trainer:
        for first in phases(engine, trainer, config, BASE).values():
            first()
        for factor, sizes in FACTORS.items():
            points = [phases(engine, trainer, config, BASE | {factor: size}) for size in sizes]
            for phase in points[0]:
                held = [peak(point[phase]) for point in points]
                told = ", ".join(f"{size / MIB:.1f}" for size in held)
                detail = f"{told} MiB at {', '.join(map(str, sizes))} {factor}; 0 is a bound, 1 a straight line"
                power = exponent(sizes[-2:], held[-2:])
                yield Row(f"{phase}, memory against {factor}", power, "lower", detail, 1.1, "power")


def peak(action: Action) -> int:
    """Bytes that this process would hold at the peak of ``action``, above what it holds before."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, or the action would find room that is counted already
    context = multiprocessing.get_context("fork")
    there, here = context.Pipe(duplex=False)
    child = context.Process(target=_measured, args=(action, here))
    child.start()
    here.close()
    try:
        return int(there.recv())
    except EOFError:
        raise AssertionError("the fork ended without a figure") from None
    finally:
        child.join()


def _measured(action: Action, told: Connection) -> None:
    before = psutil.Process().memory_info().rss
    action()
    told.send(high_water() - before)

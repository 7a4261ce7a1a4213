"""What a round must cost on this machine whoever does it: its matrix products and the bytes it has to move.

The floor of a phase is the larger of FLOPs / measured FLOP rate and bytes / measured bandwidth (the roofline of
Williams, Waterman and Patterson, CACM 2009). Attention, norms and sampling are left out: real work is above the floor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mempo.config import Config
from mempo.footprint import number_size
from mempo.plan import PROBE_TOKENS, round_tokens
from mempo.shapes import Shape, num_parameters, shape_of

SIZES = (256, 512, 1024, 2048)  # of square matrices
COPIED = 2**28  # bytes: no cache holds them


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured in float32 with ``threads`` threads: FLOPs of matrix products and bytes read and written, a second."""

    flop_rate: float
    bandwidth: float
    threads: int


@dataclass(frozen=True, slots=True)
class Floor:
    """``flops`` and ``bytes`` that a phase of a round must spend."""

    phase: str
    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        return max(self.flops / machine.flop_rate, self.bytes / machine.bandwidth)


def measure(repeats: int = 5) -> Machine:
    """The best of ``repeats`` at every size, with torch's present number of threads."""
    import torch

    rates = []
    for size in SIZES:
        a, b = torch.randn(size, size), torch.randn(size, size)
        rates.append(2 * size**3 / _fastest(partial(torch.mm, a, b), repeats))
    source = torch.zeros(COPIED // 4)
    target = torch.empty_like(source)
    copied = 2 * COPIED / _fastest(partial(target.copy_, source), repeats)
    return Machine(max(rates), copied, torch.get_num_threads())


def _fastest(action: Callable[[], object], repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def product_flops(shape: Shape, tokens: float, head_tokens: float, *, backward: bool = False) -> float:
    """2 a weight and token through the body, and through the vocabulary head for ``head_tokens``; 6 with gradients."""
    head = shape.vocab * shape.hidden
    body = num_parameters(shape) - head * (1 if shape.tied else 2)
    return (6.0 if backward else 2.0) * (body * tokens + head * head_tokens)


def floors(config: Config) -> list[Floor]:
    """Of one round at most: every trajectory has ``rollout.max_turns`` turns of full length, see ``plan.round_tokens``.

    Bytes: the weights once for each step of decoding a batch, and three times for each micro-batch of the update.
    """
    shape, tokens, rollout = shape_of(config.model), round_tokens(config), config.rollout
    weights = float(num_parameters(shape) * number_size(config.runtime))
    trajectories = config.loop.questions_per_round * config.loop.group_size
    at_once = min(trajectories, config.rollout.block_questions * config.loop.group_size)
    steps = rollout.max_turns * rollout.max_response_tokens * math.ceil(trajectories / at_once)
    probes = 2 * trajectories * rollout.max_turns * PROBE_TOKENS if tokens["scored"] else 0
    microbatches = math.ceil(tokens["trained"] / config.optim.tokens_per_microbatch)
    return [
        Floor("rollout, prompts", product_flops(shape, tokens["prompt"], 0), weights * rollout.max_turns),
        Floor("rollout, decoding", product_flops(shape, tokens["generated"], tokens["generated"]), weights * steps),
        Floor("score", product_flops(shape, tokens["scored"], probes), weights if probes else 0.0),
        Floor(
            "update",
            product_flops(shape, tokens["trained"], tokens["generated"], backward=True),
            3 * weights * microbatches,
        ),
    ]


def table(config: Config, machine: Machine) -> Table:
    rates = f"{machine.flop_rate / 1e9:.1f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s"
    shown = Table(
        title=f"{rates} with {machine.threads} threads, float32",
        title_justify="left",
        box=SIMPLE_HEAD,
        caption="a round at most: every turn of full length",
    )
    shown.add_column("phase")
    for name in ("FLOPs", "bytes", "seconds at least", "bound by"):
        shown.add_column(name, justify="right")
    found = floors(config)
    for floor in found:
        by = "FLOPs" if floor.flops / machine.flop_rate >= floor.bytes / machine.bandwidth else "bytes"
        shown.add_row(floor.phase, f"{floor.flops:.2e}", f"{floor.bytes:.2e}", f"{floor.seconds(machine):.3g}", by)
    shown.add_row("round", "", "", f"{sum(floor.seconds(machine) for floor in found):.3g}", "")
    return shown

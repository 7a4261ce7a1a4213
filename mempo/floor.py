"""How long a round takes on devices of known rates: what it must do (``cost``), and how near to that work comes.

The floor of a phase is the larger of FLOPs / FLOP rate and bytes / bandwidth over all devices that work on it (the
roofline of Williams, Waterman and Patterson, CACM 2009).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mempo.cost import Phase

SIZES = (256, 512, 1024, 2048)  # of square matrices
COPIED = 2**28  # bytes: no cache holds them
# Floor / time, of the engine hf and the trainer torch in float32 on a CPU, in SmolLM2-135M's sizes: the rows "share of
# the floor" in benchmarks/RESULTS.md. Reading prompts is taken to reach what scoring does.
REACHED: Mapping[str, float] = MappingProxyType({"prompts": 0.6, "decoding": 0.4, "score": 0.6, "update": 0.5})


@dataclass(frozen=True, slots=True)
class Device:
    """FLOPs of matrix products and bytes read or written, a second."""

    flop_rate: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not all(0 < rate < math.inf for rate in (self.flop_rate, self.bandwidth)):
            raise ValueError(f"--tflops, --gbps: expected numbers above 0, found {self.flop_rate}, {self.bandwidth}")

    def floor(self, phase: Phase) -> float:
        """Seconds that ``phase`` takes at least on as many devices as it has."""
        return max(phase.flops / self.flop_rate, phase.bytes / self.bandwidth) / phase.devices

    def bound(self, phase: Phase) -> str:
        return "FLOPs" if phase.flops / self.flop_rate >= phase.bytes / self.bandwidth else "bytes"


def measure(repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> Device:
    """This CPU in float32 with torch's present number of threads: the best of ``repeats`` at every size."""
    import torch

    rates = []
    for size in SIZES:
        a, b = torch.randn(size, size), torch.randn(size, size)
        rates.append(2 * size**3 / _fastest(partial(torch.mm, a, b), repeats, clock))
    source = torch.zeros(COPIED // 4)
    target = torch.empty_like(source)
    return Device(max(rates), 2 * COPIED / _fastest(partial(target.copy_, source), repeats, clock))


def _fastest(action: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    best = math.inf
    for _ in range(repeats):
        started = clock()
        action()
        best = min(best, clock() - started)
    return best


def reached(given: Sequence[str]) -> dict[str, float]:
    """``REACHED`` with each PHASE=SHARE of ``given`` in its place. Raises ``ValueError`` for any other text."""
    found = dict(REACHED)
    for text in given:
        name, _, share = text.partition("=")
        try:
            found[name] = float(share)
        except ValueError:
            found[name] = math.nan
        if name not in REACHED or not 0 < found[name] < math.inf:
            known = ", ".join(REACHED)
            raise ValueError(f"--reached: expected PHASE=SHARE, of {known} and a share above 0, found {text!r}")
    return found


def table(phases: Sequence[Phase], device: Device, shares: Mapping[str, float]) -> Table:
    """What each phase takes on such devices at least, and where it reaches its share of that."""
    rates = f"{device.flop_rate / 1e12:.4g} TFLOP/s and {device.bandwidth / 1e9:.4g} GB/s a device"
    title = f"seconds of a round at most, {rates}"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    shown.add_column("phase")
    for name in ("devices", "FLOPs", "bytes", "bound by", "floor", "reached", "seconds", "share"):
        shown.add_column(name, justify="right")
    floors = {phase.name: device.floor(phase) for phase in phases}
    seconds = {name: floor / shares[name] for name, floor in floors.items()}
    whole = sum(seconds.values())
    for phase in phases:
        name = phase.name
        work = (str(phase.devices), f"{phase.flops:.2e}", f"{phase.bytes:.2e}", device.bound(phase))
        took = (_told(floors[name]), f"{shares[name]:.0%}", _told(seconds[name]), f"{seconds[name] / whole:.0%}")
        shown.add_row(name, *work, *took)
    shown.add_row("round", "", "", "", "", _told(sum(floors.values())), "", _told(whole), "")
    return shown


def _told(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"

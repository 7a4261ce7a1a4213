"""How runs stand, from their files alone: alive, killed, finished or damaged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from rich.table import Table

from mempo import history, journal, lease
from mempo.workspace import Run

LAST = 5  # finished rounds that tell the rate
ERRORS = 3
State = Literal["at work", "stopped", "finished", "damaged"]


@dataclass(frozen=True, slots=True)
class Status:
    """``done`` of ``total`` rounds, of a warm start steps; EMs are of the last round and of the last dev check."""

    run: str
    state: State
    phase: str
    done: int = 0
    total: int = 0
    worker: str | None = None
    seconds_a_round: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    em: float | None = None
    dev_em: float | None = None
    disk_bytes: int = 0
    errors: list[str] = field(default_factory=list)


def find(root: Path, named: Sequence[str]) -> list[Path]:
    """The run folders under ``root``/runs, or those named: by a path or by the policy. Raises ``FileNotFoundError``."""
    runs = root / "runs"
    if not named:
        return sorted(path for path in runs.glob("*") if re.search(r"-[0-9a-f]{8}$", path.name))
    found: list[Path] = []
    for name in named:
        paths = [Path(name)] if Path(name).is_dir() else sorted(runs.glob(f"{name}-*"))
        if not paths:
            raise FileNotFoundError(f"{name}: no run folder, and none of that policy in {runs}")
        found += paths
    return found


def of(folder: Path) -> Status:
    """Whatever is in the folder, a status: what cannot be read is told by name."""
    disk = sum(map(_size, folder.rglob("*")))
    errors = [_line(entry) for entry in journal.last(folder, ERRORS, level=logging.WARNING)]
    try:
        run = history.recorded_run(folder)
        found = _warm_start(run, disk, errors) if run.name == "warmstart" else _training(run, disk, errors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Status(folder.name, "damaged", journal.told(error), disk_bytes=disk, errors=errors)
    return found


def _training(run: Run, disk: int, errors: list[str]) -> Status:
    done, total, worker = history.num_finished(run), run.config.loop.num_rounds, _worker(run)
    walls, tokens = [], 0.0
    for index in range(max(0, done - LAST), done):
        wall = history.round_clock(run, index).get("wall_s")
        if wall:
            walls.append(wall)
            tokens += history.round_figures(run, index)["response_tokens"]
    seconds = fmean(walls) if walls else None
    checks = [i for i in range(done) if "check" in history.steps_of(run.config, i)]
    return Status(
        run.folder.name,
        _state(worker, done, total),
        "" if done >= total else f"round {done}, {_next_step(run, done)}",
        done,
        total,
        worker,
        seconds,
        tokens / sum(walls) if walls else None,
        seconds * (total - done) if seconds and worker else None,
        _figure(run, done - 1, "advantage", "em"),
        _figure(run, checks[-1], "check", "em_greedy") if checks else None,
        disk,
        errors,
    )


def _warm_start(run: Run, disk: int, errors: list[str]) -> Status:
    steps = [int(path.name.removeprefix("step_")) for path in run.folder.glob("step_*")]
    done, total, worker = max(steps, default=0), run.config.warmstart.num_steps, _worker(run)
    return Status(
        run.folder.name,
        _state(worker, done, total),
        "" if done >= total else f"step {done}",
        done,
        total,
        worker,
        disk_bytes=disk,
        errors=errors,
    )


def _state(worker: str | None, done: int, total: int) -> State:
    return "at work" if worker else "finished" if done >= total else "stopped"


def _next_step(run: Run, round_index: int) -> str:
    left = (step for step in history.steps_of(run.config, round_index) if not history.entry(run, round_index, step))
    return next(left, "log")


def _figure(run: Run, round_index: int, step: str, name: str) -> float | None:
    made = history.entry(run, round_index, step) if round_index >= 0 else None
    return made["figures"].get(name) if made else None


def _worker(run: Run) -> str | None:
    """Who holds the policy's lock and writes in this folder's log. A host that was lost holds it until another asks."""
    try:
        owner = lease.owner(*run.lock)
    except OSError:  # a store that is away
        return None
    if owner is None or owner.has_ended():
        return None
    lines = journal.last(run.folder, 1000)
    wrote = any((line.get("host"), line.get("process")) == (owner.host, owner.pid) for line in lines)
    return str(owner) if not lines or wrote else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # a run at work has just taken it away
        return 0


def _line(entry: dict[str, object]) -> str:
    where = " ".join(str(entry[name]) for name in ("task", "round") if name in entry)
    return f"{entry.get('time', '')} {entry.get('level', '')} {where}: {entry.get('message', '')}"


def table(found: Iterable[Status]) -> Table:
    """One row a run; the rate is of its last rounds."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("run", no_wrap=True)
    for name in ("state", "at", "done", "round", "an hour", "tokens/s", "left", "EM", "dev", "disk"):
        shown.add_column(name)
    for s in found:
        seconds = s.seconds_a_round
        rate = (f"{seconds:.3g} s", f"{3600 / seconds:.3g}", f"{s.tokens_per_s:.3g}") if seconds else ("", "", "")
        left = "" if s.eta_s is None else f"{s.eta_s / 3600:.1f} h" if s.eta_s >= 3600 else f"{s.eta_s:.0f} s"
        scores = ["" if em is None else f"{em:.3f}" for em in (s.em, s.dev_em)]
        disk = f"{s.disk_bytes / 1e6:.1f} MB"
        shown.add_row(s.run, s.state, s.phase, f"{s.done}/{s.total}", *rate, left, *scores, disk)
    return shown


def notes(found: Iterable[Status]) -> list[str]:
    """Who works on the runs, and their last errors."""
    return [f"{s.run}: {note}" for s in found for note in [*([s.worker] if s.worker else []), *s.errors]]

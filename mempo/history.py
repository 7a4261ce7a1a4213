"""What a run folder says of its rounds: figures, seconds, clocks. Read from the steps' own files, never kept twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from mempo import rounds, storage
from mempo.config import Config
from mempo.params import ConfigError
from mempo.samples import TurnReward
from mempo.workspace import Run, Workspace, recorded

STEPS = ("rollout", "score", "advantage", "diagnose", "update", "check")
PREFIXES = {"diagnose": "control/", "check": "dev/"}


def recorded_run(folder: Path) -> Run:
    """A run from its folder alone, with the number of rounds that its last start asked for.

    Raises ``ConfigError`` where it is no run folder, see ``recorded``.
    """
    if not re.fullmatch(r"[a-z0-9_-]+-[0-9a-f]{8}", folder.resolve().name):
        raise ConfigError(f"{folder}: no run folder: its name would end in a key of 8 digits, as runs/mempo-1a2b3c4d")
    config = recorded(folder)
    state = folder / "mlflow.json"
    if state.exists() and (asked := storage.read_json(state).get("num_rounds")):
        config = config.model_copy(update={"loop": config.loop.model_copy(update={"num_rounds": asked})})
    return Run(folder.name.rpartition("-")[0], folder, config, Workspace(folder.resolve().parents[1]))


def entry(run: Run, round_index: int, name: str) -> dict[str, Any] | None:
    """What the step ``name`` of a round left when it was done, ``<name>.json``; None where it is not."""
    path = run.round(round_index) / f"{name}.json"
    return storage.read_json(path) if path.exists() else None


def steps_of(config: Config, round_index: int) -> tuple[str, ...]:
    """The steps of a round in their order: known memories are shown, and the policy checked, every few rounds."""
    every, dev = config.diagnose.every, config.loop.dev_every
    left_out = set()
    if not every or round_index % every or config.rollout.context != "memory":
        left_out.add("diagnose")
    if not dev or (round_index + 1) % dev:
        left_out.add("check")
    return tuple(step for step in STEPS if step not in left_out)


def num_finished(run: Run) -> int:
    """Rounds 0, 1, ... of which every step is done, up to the first that lacks one."""
    count = 0
    while (run.round(count) / "log.json").exists():
        count += 1
    return count


def round_figures(run: Run, round_index: int) -> dict[str, float]:
    """All figures of a finished round, seconds per step included, under the names MLflow shows."""
    found: dict[str, float] = {}
    for name in STEPS:
        if made := entry(run, round_index, name):
            prefix = PREFIXES.get(name, "")
            found |= {f"{prefix}{key}": value for key, value in made["figures"].items()}
            found |= {f"time/{name}_s": made["seconds"], f"cpu/{name}_s": made["cpu_seconds"]}
    return found


def finished_ms(run: Run, round_index: int) -> int:
    """When the round's update was done, in ms since 1970: so a point that is logged twice is the same point."""
    made = storage.read_json(run.round(round_index) / "update.json")
    return int((made["started"] + made["seconds"]) * 1000)


def rewards_table(run: Run, last_round: int) -> pd.DataFrame:
    """Every turn's reward of rounds 0 to ``last_round``, one row a turn."""
    files = [run.round(i) / "rewards.parquet" for i in range(last_round + 1)]
    tables = [rounds.reward_frame(storage.read_records(file, TurnReward)) for file in files]
    return pd.concat([table.assign(round=i) for i, table in enumerate(tables)], ignore_index=True)


def best_version(run: Run, last_round: int) -> int:
    """The policy version with the best greedy dev score so far, the latest of equals; 0 where none was checked."""
    best, version = float("-inf"), 0
    for index in range(last_round + 1):
        checked = entry(run, index, "check")
        if checked and checked["figures"]["em_greedy"] >= best:
            best, version = checked["figures"]["em_greedy"], index + 1
    return version


def round_clock(run: Run, round_index: int) -> dict[str, float]:
    """Wall clock of a round, from the end of the one before, and of its steps; the rest is orchestration.

    A round that a kill cut in two has no wall. ``clock`` is a process's own, which nobody sets.
    """
    made = {name: found for name in (*STEPS, "log") if (found := entry(run, round_index, name))}
    if len({found["process"] for found in made.values()}) > 1:
        return {}
    before = entry(run, round_index - 1, "log")
    follows = before is not None and before["process"] == made["log"]["process"]
    began = before["clock"] if before and follows else made["rollout"]["clock"]
    work = sum(found["seconds"] for name, found in made.items() if name != "log")
    return {"wall_s": made["log"]["clock"] - began, "work_s": work}

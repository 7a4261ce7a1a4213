"""A run folder as a training leaves it, of invented records: what reads run folders needs no model to be tested."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from mempo import history, rounds, storage
from mempo.config import Config
from mempo.workspace import Run, Workspace
from tests.unit import results_tree as invented

BEGAN, ROUND_S = 1_796_000_000.0, 10.0
SECONDS = {"rollout": 4.0, "score": 1.0, "advantage": 0.5, "diagnose": 1.0, "update": 2.0, "check": 1.0}
SETTINGS = {
    "loop": {"num_rounds": 6, "dev_every": 3},
    "diagnose": {"every": 2},
    "tracking": {"figure_every": 3},
    "policies": {"mempo": {}},
}


def make_run(root: Path, policy: Path, finished: int = 6) -> Run:
    """A run of six rounds, ``finished`` of them done; ``policy`` is what it started from."""
    workspace = Workspace(root)
    shutil.copytree(policy, workspace.checkpoint("warmstart"), dirs_exist_ok=True)
    run = workspace.run("mempo", Config.model_validate(SETTINGS), {"data": "d" * 64})
    for index in range(finished):
        write_round(run, index)
    return run


def write_round(run: Run, index: int, *, until: str = "log") -> None:
    """Round ``index`` up to the step ``until``: records, and each step's figures."""
    folder, chance = run.round(index), random.Random(index)
    asked = invented.questions(2)
    made = invented.rollouts(asked, 0.5, chance, group=2)
    table = invented.rewards(made, asked, chance, memory=True, skill=index / 6)
    storage.write_records(folder / "questions.parquet", asked)
    storage.write_records(folder / "rollouts.parquet", made)
    storage.write_records(folder / "scores.parquet", invented.scores(made, table))
    storage.write_records(folder / "rewards.parquet", table)
    figures = {
        "rollout": rounds.rollout_figures(made),
        "advantage": rounds.reward_figures(table) | {"em": index / 10},
        "check": {"em_greedy": index / 5},
    }
    clock = BEGAN + ROUND_S * index
    for step in history.steps_of(run.config, index):
        if step == until:
            return
        times = {"started": clock, "clock": clock, "seconds": SECONDS[step], "cpu_seconds": SECONDS[step]}
        made_by = {"figures": figures.get(step, {"x": float(index)}), "process": "1@1"}
        storage.write_json(folder / f"{step}.json", made_by | times)
        clock += SECONDS[step]
    if until == "log":
        finished = {"seconds": 0.5, "clock": BEGAN + ROUND_S * (index + 1), "process": "1@1"}
        storage.write_json(folder / "log.json", finished)

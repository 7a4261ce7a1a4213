"""A run's pages in MLflow, from its files alone: a training keeps them up, ``mempo log-again`` makes them anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from mempo import figures as drawing, history, journal, rounds, storage, viewer
from mempo.config import OF_MANY
from mempo.engines.loader import load_tokenizer
from mempo.workspace import Run
from tasks import traces, tracking

TRACED = 4  # trajectories of a round with pictures
SHOWN = (
    *("em", "reward/mean", "format_rate", "turns", "dev/em_greedy"),
    *("mem_reward/p05", "mem_reward/p50", "mem_reward/p95", "p_mem/mean", "p_full/mean"),
    *("diagnose/truth/correlation", "diagnose/filter/flips_none"),
    *("approx_kl", "clip_fraction", "grad_norm", "entropy", "mismatch/kl"),
)


def open_pages(run: Run, tags: Mapping[str, str]) -> tracking.TrackedRun:
    """One flat MLflow run a training, known by the key in ``mlflow.json`` of the run folder. No store is asked."""
    described = storage.read_json(run.config_file)
    params = {name: value for name, value in described["config"].items() if name not in OF_MANY}
    return tracking.open_tracking(
        run.name,
        params,
        _provenance(run, described) | tags,
        run.folder / "mlflow.json",
        experiment=run.config.tracking.experiment,
        num_rounds=run.config.loop.num_rounds,
    )


def _provenance(run: Run, described: Mapping[str, Any]) -> dict[str, str]:
    """Where a run's figures come from: tags by which MLflow's table is searched and its charts are grouped."""
    return {
        "policy": run.name,
        "run_folder": run.folder.name,
        "context": run.config.rollout.context,
        "seed": str(run.config.loop.seed),
        "config_hash": run.folder.name.rpartition("-")[2],
        "data_hash": str(described["inputs"]["data"])[:12],
        "git_commit": described["versions"].get("commit", "unknown"),
    }


def update(run: Run, opened: tracking.TrackedRun, last_round: int) -> None:
    """Log what the store lacks of rounds 0 to ``last_round``: figures, and every ``figure_every`` rounds pictures."""
    tracking.begin(opened)
    missing = range(opened.last_logged + 1, last_round + 1)
    pictured = [i for i in missing if _has_pictures(run, i)]
    for index in missing:
        at = history.finished_ms(run, index)
        tracking.log_metrics(opened, history.round_figures(run, index), index, at)
        if index in pictured:
            for trace in _traces(run, index):
                tracking.log_trace(opened, trace, at)
        if index == max(pictured, default=None):
            _log_pictures(run, opened, index)
        opened.log_through(index)


def _has_pictures(run: Run, round_index: int) -> bool:
    return round_index == run.config.loop.num_rounds - 1 or (round_index + 1) % run.config.tracking.figure_every == 0


def _log_pictures(run: Run, opened: tracking.TrackedRun, round_index: int) -> None:
    table = pd.DataFrame([{"round": i} | history.round_figures(run, i) for i in range(round_index + 1)])
    columns = ["round", *(name for name in SHOWN if name in table)]
    tracking.log_table(opened, "rounds", {name: table[name].tolist() for name in columns})
    rewards = history.rewards_table(run, round_index)
    tracking.log_figure(opened, drawing.mem_reward_box(rewards), "mem_reward_box.png")
    tracking.log_figure(opened, drawing.mem_reward_by_turn(rewards), "mem_reward_by_turn.png")


def _traces(run: Run, round_index: int) -> list[traces.Trace]:
    """A few of the round's trajectories, one of each kind that the report's viewer shows."""
    made = rounds.read_round(run.round(round_index))
    scenes = viewer.scenes(
        made.trajectories, made.questions, made.scores, made.table, run.config.mem_reward, count=TRACED
    )
    tokenizer = load_tokenizer(run.policy(0))
    prompts = [[tokenizer.decode(view.turn.prompt_ids) for view in scene.turns] for scene in scenes]
    return [traces.trace(scene, texts, round_index) for scene, texts in zip(scenes, prompts, strict=True)]


def finish(run: Run, opened: tracking.TrackedRun) -> None:
    """The pages of a run that has ended: all its rounds, and how it ended."""
    update(run, opened, history.num_finished(run) - 1)
    tracking.end(opened)


def log_again(folder: Path) -> str:
    """Make the pages of a run folder in the store of ``MLFLOW_TRACKING_URI``; returns the id of the MLflow run.

    Pages that are there get what they lack. Waits for a training that works on the run. Raises ``ConnectionError``.
    """
    run = history.recorded_run(folder)
    with run.alone():
        opened = open_pages(run, {})
        if opened.status == "RUNNING":  # and nobody works on it: it was killed
            opened.become("KILLED")
        opened.log_through(-1)
        try:
            finish(run, opened)
        except Exception as error:  # of MLflow, of a database's driver, of a network
            raise ConnectionError(journal.told(error)) from error
        return tracking.begin(opened)

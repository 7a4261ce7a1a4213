"""The ablation matrix: variants x seeds x mixes, side by side, each from its seed's own warm start (``mempo ablate``).

A cell is one training and its evaluation. It ends in ``ablation/<mix>/seed_<n>/<variant>/``, whose ``cell.json``
says what made it: only cells that are missing, damaged, or were made otherwise run again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from prefect import flow, task
from prefect.futures import wait
from prefect.task_runners import ThreadPoolTaskRunner

from flows.train import train
from flows.warmstart import begin_workspace
from mempo import storage, study
from mempo.matrix import Asked, Cell, Made, matrix, study_folder
from mempo.overrides import Overrides
from mempo.workspace import Run
from tasks import processes
from tasks.data import open_run, read_config
from tasks.evaluation import evaluate_policy

QUALITY = "diagnose/truth/quality"  # true quality of a round's memories; cell.json holds the mean of the last rounds
LAST_ROUNDS = 4


@flow(name="ablate", persist_result=False)
def ablate(
    overrides: Overrides = None,
    root: str = ".",
    quick: bool = False,
    mixes: list[str] | None = None,
    seeds: list[int] | None = None,
    variants: list[str] | None = None,
) -> dict[str, str]:
    """Run what is missing of params.yaml's matrix, or of the named part; returns label -> error of what failed.

    A failed cell stops no other. Raises ``ConfigError`` before any work where a variant is wrong.
    """
    cells = matrix(Path(root), overrides or [], quick=quick, mixes=mixes, seeds=seeds, variants=variants)
    asked = read_config(Path(root), overrides or []).ablate
    told = Asked(targets=dict(asked.targets), baselines=asked.baselines, variants=list(asked.variants))
    storage.write_json(study_folder(Path(root), quick) / "study.json", told.model_dump())
    pool: Any = ThreadPoolTaskRunner(max_workers=asked.workers)
    return _cells.with_options(task_runner=pool)(cells)


@flow(name="cells", persist_result=False)
def _cells(cells: list[Cell]) -> dict[str, str]:
    try:
        wait([begin.submit(cell) for cell in {cell.home: cell for cell in cells}.values()])
        futures = {cell.label: run_cell.submit(cell) for cell in cells}
        wait(list(futures.values()))
    except BaseException:  # a signal: Prefect's runner would wait for every cell to end by itself
        processes.stop()
        raise
    return {label: str(f.state.message) for label, f in futures.items() if not f.state.is_completed()}


@task(task_run_name="begin {cell.mix}/{cell.seed}", persist_result=False)
def begin(cell: Cell) -> None:
    """Data and warm start of one seed and mix, unless they are there."""
    _run(_begin, cell)


@task(task_run_name="{cell.label}", persist_result=False)
def run_cell(cell: Cell) -> None:
    """Train and evaluate one variant, unless its ``cell.json`` says that just this was done."""
    _run(_cell, cell)


def _run(flow: Any, cell: Cell) -> None:
    """``flow(cell)`` in a process of its own. Raises ``RuntimeError`` with what it failed of."""
    cell.failure.unlink(missing_ok=True)
    if code := processes.run(flow, {"cell": cell}):
        told = cell.failure.read_text(encoding="utf-8") if cell.failure.exists() else "killed"
        raise RuntimeError(f"{told} (exit code {code})")


@contextmanager
def _told(cell: Cell) -> Iterator[None]:
    """What a cell failed of is told by a file beside its folder: exit codes have no words."""
    try:
        yield
    except Exception as error:
        cell.failure.parent.mkdir(parents=True, exist_ok=True)
        cell.failure.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


@flow(name="begin", persist_result=False, validate_parameters=False)
def _begin(cell: Cell) -> None:
    with _told(cell):
        begin_workspace(cell.root, cell.home, list(cell.settings))


@flow(name="cell", flow_run_name="{cell.label}", persist_result=False, validate_parameters=False)
def _cell(cell: Cell) -> None:
    with _told(cell):
        _make(cell)


def _make(cell: Cell) -> None:
    run = open_run(cell.variant, cell.settings, cell.home)
    if study.is_made(cell, run.folder.name):
        return
    tags = {"ablation": cell.mix, "variant": cell.variant, "seed": str(cell.seed)}
    train(cell.variant, list(cell.settings), str(cell.home), tags)
    rows = evaluate_policy(run.workspace, cell.variant, run.workspace.checkpoint(cell.variant), run.config)
    rounds = _rounds(run)
    quality = rounds.reindex(columns=[QUALITY])[QUALITY].tail(LAST_ROUNDS).dropna()
    made = Made(mix=cell.mix, seed=cell.seed, variant=cell.variant, run=run.folder.name, shared=cell.shared,
                quality=float(quality.mean()) if len(quality) else None)  # fmt: skip
    with storage.whole_folder(cell.folder) as folder:
        rounds.to_parquet(folder / "rounds.parquet")
        storage.write_records(folder / "evaluation.parquet", rows)
        shutil.copyfile(run.workspace.results(cell.variant) / "rewards.parquet", folder / "rewards.parquet")
        storage.write_json(folder / "cell.json", made.model_dump())


def _rounds(run: Run) -> pd.DataFrame:
    """The rounds that were asked for: a folder may hold more, of an earlier and longer run."""
    rounds = pd.read_parquet(run.workspace.results(run.name) / "rounds.parquet")
    return rounds[rounds["round"] < run.config.loop.num_rounds]

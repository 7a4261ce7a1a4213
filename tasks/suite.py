"""The cells of a suite, one an agent and dataset, resumable; and their runs in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from prefect import task
from prefect.runtime import flow_run

from mempo import storage
from mempo.agents import Agent
from mempo.config import OF_MANY
from mempo.data.asked import majority, prepare_asked
from mempo.records import Question
from mempo.suite import Suite
from mempo.suite_results import ALL, MEASURES, Results
from mempo.workspace import Workspace
from tasks import tracking
from tasks.evaluation import Attempts, answers, answers_key
from tasks.patience import Patience

WAIT_S = 60.0  # for the pages of one cell


@dataclass(frozen=True, slots=True)
class Cell:
    """One agent on one dataset. ``folder``: rows.parquet, cost.json, mlflow.json; its name is a key of what made it."""

    agent: Agent
    dataset: str
    folder: Path
    majority: Mapping[str, float]

    @property
    def rows(self) -> pd.DataFrame:
        rows = pd.read_parquet(self.folder / "rows.parquet")
        kinds = rows["greedy"].map({True: "greedy", False: "sampled"})
        return rows.assign(dataset=self.dataset, attempts=kinds).drop(columns="greedy")

    @property
    def seconds(self) -> float:
        return float(storage.read_json(self.folder / "cost.json")["seconds"])


@dataclass(frozen=True, slots=True)
class Dataset:
    """What every agent is asked, searching the corpus of ``folder``. ``inputs``: what answers depend on of it."""

    name: str
    folder: Path
    questions: list[Question]
    inputs: dict[str, Any]
    majority: Mapping[str, float]


@task(task_run_name="prepare {name}", persist_result=False)
def prepare(workspace: Workspace, suite: Suite, agents: list[Agent], name: str, home: Path) -> Dataset:
    """A dataset of the suite, once for all agents: they have their data in common."""
    asked = suite.datasets[name]
    config = next((agent.config for agent in agents if not agent.config.search.urls), agents[0].config)
    try:
        folder, questions = prepare_asked(asked, config, workspace.data, home)
    except ValueError as error:
        raise ValueError(f"{home.name}, dataset {name}: {error}") from None
    inputs = {"data": storage.content_hash(folder), "asked": asked.model_dump(mode="json")}
    return Dataset(name, folder, questions, inputs, majority(folder, asked))


@task(task_run_name="{agent.name} on {dataset.name}", persist_result=False)
def answer(suite: Suite, agent: Agent, dataset: Dataset, home: Path) -> Cell:
    """The agent's answers to a dataset, unless they are there."""
    attempts = Attempts(suite.samples, suite.greedy, suite.temperature, suite.seed)
    key = answers_key(agent.policy, agent.config, attempts, dataset.inputs)
    cell = Cell(agent, dataset.name, home / f"{agent.name}-{dataset.name}-{key}", dataset.majority)
    if not cell.folder.exists():
        started = time.monotonic()
        rows = answers(agent.name, agent.policy, agent.config, dataset.folder, dataset.questions, attempts)
        with storage.whole_folder(cell.folder) as folder:
            storage.write_records(folder / "rows.parquet", rows)
            storage.write_json(folder / "cost.json", {"seconds": time.monotonic() - started})
    return cell


def gathered(name: str, suite: Suite, cells: list[Cell]) -> Results:
    return Results(
        name=name,
        agents=list(suite.agents),
        rows=pd.concat([cell.rows for cell in cells], ignore_index=True),
        seconds={(cell.agent.name, cell.dataset): cell.seconds for cell in cells},
        majority={cell.dataset: cell.majority for cell in cells},
    )


def log_cells(cells: list[Cell], results: Results) -> bool:
    """A flat MLflow run a cell: figures of all questions, and as a curve with the number of objectives as its step.

    Whether all of them got there: a store that is away ends no evaluation.
    """
    store = Patience("MLflow")
    return all([store.attempt(partial(_log, cell, results), WAIT_S) for cell in cells])


def _log(cell: Cell, results: Results) -> None:
    agent, figures = cell.agent, results.figures
    tags = {"suite": results.name, "agent": agent.name, "dataset": cell.dataset, "flow_run_id": str(flow_run.id or "")}
    config = agent.config.model_dump(mode="json", exclude=OF_MANY)
    run = tracking.open_tracking(
        f"{agent.name} on {cell.dataset}", config, tags, cell.folder / "mlflow.json", experiment="mempo-evaluation"
    )
    mine = figures[(figures["agent"] == agent.name) & (figures["dataset"] == cell.dataset)]
    at = int((cell.folder / "cost.json").stat().st_mtime * 1000)
    for row in mine.to_dict("records"):
        prefix = f"{row['attempts']}/{'' if row['objectives'] == ALL else 'by_objectives/'}"
        values = {f"{prefix}{name}": row[name] for name in MEASURES}
        tracking.log_metrics(run, values, 0 if row["objectives"] == ALL else int(row["objectives"]), at)
    run.become("FINISHED")
    tracking.end(run)

"""What a run leaves behind: figures to MLflow and Prefect round by round, outputs to DVC at the end."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import UUID

import pandas as pd
from prefect import task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.context import TagsContext
from prefect.runtime import flow_run

from mempo import diagnoses, history, journal, local, lora, rounds, storage
from mempo.console import console
from mempo.rescore import chains
from mempo.workspace import Run
from tasks import flow_runs, pages, tracking
from tasks.diagnose import controls_table
from tasks.patience import WAIT_S, Patience
from tasks.round import PROCESS, remake, truth

log = logging.getLogger(__name__)

DIAGNOSED = 8  # last rounds whose diagnoses the report shows together
END_S = 300.0  # at the end, for pages that are far behind


@dataclass(slots=True)
class Opened:
    """Where an open run is shown: its MLflow run; on its page in Prefect a progress artifact and tables of rounds."""

    pages: tracking.TrackedRun
    mlflow: Patience
    prefect: Patience
    progress: UUID | None = None
    shown: int = -1


@contextmanager
def tracked(run: Run, tags: Mapping[str, str]) -> Iterator[Opened]:
    """The run with its log and its pages open; they end with it, as what it came to."""
    # A task that bears tags asks the server for their slots before it begins: rounds go on without a server.
    with journal.kept(run.folder, run.name), TagsContext(current_tags=set()):
        run.join()
        found = pages.open_pages(run, {"flow_run_id": str(flow_run.id or "")} | dict(tags))
        found.become("RUNNING")
        opened = Opened(found, Patience("MLflow"), Patience("Prefect"))
        opened.mlflow.attempt(partial(tracking.begin, found))
        opened.prefect.attempt(partial(flow_runs.take_over, datetime.now(UTC)))
        try:
            yield opened
        except Exception:
            _close(run, opened, "FAILED", END_S)
            raise
        except BaseException:  # a signal
            console.print(f"{run.folder.name}: stopped; the same command goes on", soft_wrap=True)
            _close(run, opened, "KILLED", WAIT_S)
            raise
        _close(run, opened, "FINISHED", END_S)


def _close(run: Run, opened: Opened, status: str, wait_s: float) -> None:
    """Tried even where the server was away a moment ago."""
    opened.pages.become(status)
    opened.prefect.silent_until = opened.mlflow.silent_until = 0.0
    if status == "FINISHED":
        opened.prefect.attempt(partial(_show, run, opened, run.config.loop.num_rounds - 1), wait_s)
        opened.prefect.attempt(flow_runs.put_right)
    if not opened.mlflow.attempt(partial(pages.finish, run, opened.pages), wait_s):
        console.print(
            f"MLflow has not all of {run.folder.name}: `mempo log-again {run.folder}` logs what it lacks",
            soft_wrap=True,
        )


@task(task_run_name="log {round_index}", persist_result=False)
def log_round(run: Run, opened: Opened, round_index: int) -> None:
    """Distributions of mem_reward to MLflow, table and progress to Prefect; then old policies leave the run folder."""
    started, logged = time.perf_counter(), run.round(round_index) / "log.json"
    with journal.within(task="log", round=round_index):
        if not logged.exists():
            log.info("round done", extra={"figures": _shown(run, round_index)})
        opened.mlflow.attempt(partial(pages.update, run, opened.pages, round_index))
        opened.prefect.attempt(partial(_show, run, opened, round_index))
        _prune(run, round_index)
    if not logged.exists():
        clock = time.perf_counter()
        storage.write_json(logged, {"seconds": clock - started, "clock": clock, "process": PROCESS})
        run.share.send(opened.pages.state_file, logged)


def _show(run: Run, opened: Opened, last_round: int) -> None:
    """The figures of the rounds that were not shown yet as table artifacts, the rounds done as a progress artifact."""
    local.revive()
    name, total = run.name.replace("_", "-"), run.config.loop.num_rounds
    for index in range(opened.shown + 1, last_round + 1):
        create_table_artifact(
            key=f"{name}-round-{index:04d}",
            table=[{"figure": figure, "value": value} for figure, value in _shown(run, index).items()],
            description=f"{run.name}, round {index}",
        )
        opened.shown = index
    percent, told = 100 * (last_round + 1) / total, f"{run.name}: {last_round + 1} of {total} rounds"
    if opened.progress is None:
        opened.progress = create_progress_artifact(percent, f"{name}-rounds", told)
    else:
        update_progress_artifact(opened.progress, percent, told)


def _shown(run: Run, round_index: int) -> dict[str, float]:
    found = history.round_figures(run, round_index)
    return {name: found[name] for name in pages.SHOWN if name in found}


def _prune(run: Run, round_index: int) -> None:
    """Keep the policies that a resume, the best dev check or ``keep_every`` needs; the rest is scratch."""
    every = run.config.loop.keep_every
    keep = {round_index, round_index + 1, history.best_version(run, round_index)}
    there = {*run.folder.glob("policy_*"), *run.share.units(run.folder)}
    for version in range(1, round_index):
        if version not in keep and not (every and version % every == 0) and run.policy(version) in there:
            run.share.drop(run.policy(version))
            shutil.rmtree(run.policy(version), ignore_errors=True)
            log.info("pruned policy %d", version)


@task(persist_result=False)
def publish(run: Run) -> None:
    """What DVC keeps: ``checkpoints/<name>/`` (final, best, kept rounds) and ``results/<name>/`` (figures and rows)."""
    workspace, last = run.workspace, run.config.loop.num_rounds - 1
    kept = {"final": last + 1, "best": history.best_version(run, last) or last + 1}
    if every := run.config.loop.keep_every:
        kept |= {f"round_{version:04d}": version for version in range(every, last + 1, every)}
    with storage.whole_folder(workspace.checkpoint(run.name).parent) as folder:
        for label, version in kept.items():
            copy_policy(remake(run, version), folder / label)
    with storage.whole_folder(workspace.results(run.name)) as folder:
        by_round = [{"round": i} | history.round_figures(run, i) | history.round_clock(run, i) for i in range(last + 1)]
        pd.DataFrame(by_round).to_parquet(folder / "rounds.parquet")
        history.rewards_table(run, last).to_parquet(folder / "rewards.parquet")
        last_rounds = [rounds.read_round(run.round(i)) for i in range(max(0, last + 1 - DIAGNOSED), last + 1)]
        storage.write_json(folder / "diagnoses.json", diagnoses.summary(last_rounds, run.config, chains(truth(run))))
        if not (controls := controls_table(run, last)).empty:
            controls.to_parquet(folder / "controls.parquet")
        shutil.copyfile(run.config_file, folder / "config.json")
        (folder / "trajectories").mkdir()
        for index in {0, last}:
            for name in ("rollouts", "questions", "scores"):
                source = run.round(index) / f"{name}.parquet"
                shutil.copyfile(source, folder / "trajectories" / f"{name}_{index:04d}.parquet")


def copy_policy(source: Path, target: Path) -> None:
    """The policy without its optimiser's moments: what runs it needs no more. An adapter is merged into its base."""
    if lora.is_adapter(source):
        lora.write_merged(source, target)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("trainer.safetensors"))

"""Preparation of what training stands on: the data, the starting policy, the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import task

from mempo import data, storage, warmstart
from mempo.config import Config
from mempo.console import progress
from mempo.params import load_config
from mempo.share import Share
from mempo.workspace import Run, Workspace


def read_config(root: Path, overrides: Sequence[str], policy: str | None = None) -> Config:
    """``params.yaml`` of the workspace with the user's overrides."""
    return load_config(root / "params.yaml", overrides, policy=policy)


@task(persist_result=False)
def prepare_data(workspace: Workspace, config: Config) -> dict[str, Any]:
    """Build corpus, questions and truth; the folder appears whole."""
    prompts = [config.prompt.system, config.prompt.system_full]
    if config.warmstart.think_share:
        prompts.append(config.prompt.system_think)
    return data.prepare(config.data, config.model, workspace.data, prompts, searched_here=not config.search.urls)


@task(persist_result=False)
def warm_start(run: Run) -> Path:
    """Supervised fine-tuning on demonstrations, resumable; returns the published policy folder."""
    with progress("warm start", run.config.warmstart.num_steps) as advance:
        return warmstart.warm_start(run, progress=advance)


def open_run(name: str, overrides: Sequence[str], root: Path) -> Run:
    """The run folder of policy ``name``, found again by its key or started. Raises ``FileNotFoundError``."""
    workspace = Workspace(root)
    config = read_config(root, overrides, policy=name)
    inputs = {"data": workspace.data, "warmstart": workspace.checkpoint("warmstart")}
    Share(root, config.storage.url).fetch(*inputs.values())
    workspace.require("warmstart")
    return workspace.run(name, config, {label: storage.content_hash(path) for label, path in inputs.items()})

"""Teach the protocol by demonstrations (``mempo warmstart``)."""

from __future__ import annotations

import shutil
from pathlib import Path

from prefect import flow

from flows.prepare import prepare
from mempo import storage
from mempo.overrides import Overrides
from mempo.workspace import Workspace
from tasks.data import read_config, warm_start


@flow(name="warmstart", persist_result=False)
def warmstart(overrides: Overrides = None, root: str = ".") -> Path:
    """Supervised fine-tuning of the starting policy; returns its folder, ``checkpoints/warmstart/final``."""
    workspace = Workspace(Path(root))
    config = read_config(Path(root), overrides or [])
    workspace.require()
    inputs = {"data": storage.content_hash(workspace.data)}
    if config.model.path and Path(config.model.path).is_dir():
        inputs["model"] = storage.content_hash(Path(config.model.path))
    run = workspace.run("warmstart", config, inputs, sections=("data", "model", "prompt", "warmstart", "runtime"))
    with run.alone():
        return warm_start(run)


def begin_workspace(root: Path, home: Path, settings: list[str]) -> Workspace:
    """``home`` with the settings file of ``root``, and with data and a warm start of its own unless they are there."""
    workspace = Workspace(home)
    home.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(root / "params.yaml", home / "params.yaml")
    if not workspace.data.exists():
        prepare(settings, str(home))
    if not workspace.checkpoint("warmstart").exists():
        warmstart(settings, str(home))
    return workspace

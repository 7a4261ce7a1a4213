"""Teach the protocol by demonstrations (``mempo warmstart``)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from mempo import storage
from mempo.workspace import Workspace
from tasks.data import read_config, warm_start


@flow(name="warmstart", persist_result=False)
def warmstart(overrides: list[str] | None = None, root: str = ".") -> Path:
    """Supervised fine-tuning of the starting policy; returns its folder, ``checkpoints/warmstart/final``."""
    workspace = Workspace(Path(root))
    config = read_config(Path(root), overrides or [])
    workspace.require()
    inputs = {"data": storage.content_hash(workspace.data)}
    run = workspace.run("warmstart", config, inputs, sections=("data", "model", "prompt", "warmstart", "runtime"))
    with run.alone():
        return warm_start(run)

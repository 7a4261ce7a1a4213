"""Compare policies on the same held-out questions (``mempo evaluate``)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from mempo.workspace import Workspace
from tasks.data import read_config
from tasks.evaluation import evaluate_policy, write_evaluation


@flow(name="evaluate", persist_result=False)
def evaluate(
    policies: list[str] | None = None, overrides: list[str] | None = None, root: str = "."
) -> dict[str, dict[str, float]]:
    """Warm start and every trained policy, each under its own context rule; returns the table by policy."""
    workspace = Workspace(Path(root))
    shared = read_config(Path(root), overrides or [])
    names = policies or ["warmstart", *shared.policies]
    workspace.require(*names)
    rows = []
    for name in names:
        config = shared if name == "warmstart" else read_config(Path(root), overrides or [], policy=name)
        rows += evaluate_policy(workspace, name, workspace.checkpoint(name), config)
    return write_evaluation(workspace, rows, shared.evaluation.split)

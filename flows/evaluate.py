"""Compare policies on the same held-out questions (``mempo evaluate``)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from mempo.config import UNTRAINED
from mempo.overrides import Overrides
from mempo.workspace import Workspace
from tasks.data import read_config
from tasks.evaluation import evaluate_policy, write_evaluation


@flow(name="evaluate", persist_result=False)
def evaluate(
    policies: list[str] | None = None, overrides: Overrides = None, root: str = "."
) -> dict[str, dict[str, float]]:
    """Untrained and trained policies, each under its own context rule; returns the table by policy.

    None named: the model at ``model.path``, if any, as ``pretrained``, the warm start, and all policies.
    """
    workspace = Workspace(Path(root))
    shared = read_config(Path(root), overrides or [])
    path = shared.model.path
    names = policies or [*UNTRAINED[0 if path else 1 :], *shared.policies]
    if "pretrained" in names and not path:
        raise ValueError("pretrained: model.path is null, this policy starts from scratch")
    workspace.require(*names)
    rows = []
    for name in names:
        config = shared if name in UNTRAINED else read_config(Path(root), overrides or [], policy=name)
        folder = Path(path) if path and name == "pretrained" else workspace.checkpoint(name)
        rows += evaluate_policy(workspace, name, folder, config)
    return write_evaluation(workspace, rows, shared.evaluation.split)

"""Compare policies on the same held-out questions (``mempo evaluate``), agents on a suite (``--suite NAME``)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from mempo import storage, suite_report, suite_results
from mempo.agents import policy_folder, read_suite
from mempo.config import UNTRAINED
from mempo.console import console
from mempo.overrides import Overrides
from mempo.workspace import Workspace
from tasks.data import read_config
from tasks.evaluation import evaluate_policy, write_evaluation
from tasks.suite import answer, gathered, log_cells, prepare


@flow(name="evaluate", persist_result=False)
def evaluate(
    policies: list[str] | None = None, overrides: Overrides = None, root: str = "."
) -> dict[str, dict[str, float]]:
    """Untrained and trained policies, each under its own context rule; returns the table by policy.

    None named: the model at ``model.path``, if any, as ``pretrained``, the warm start, and all policies.
    """
    workspace = Workspace(Path(root))
    shared = read_config(Path(root), overrides or [])
    names = policies or [*UNTRAINED[0 if shared.model.path else 1 :], *shared.policies]
    folders = {name: policy_folder(workspace.root, name, shared) for name in names}
    workspace.require(*names)
    rows = []
    for name in names:
        config = shared if name in UNTRAINED else read_config(Path(root), overrides or [], policy=name)
        rows += evaluate_policy(workspace, name, folders[name], config)
    return write_evaluation(workspace, rows, shared.evaluation.split)


@flow(name="suite", flow_run_name="{name}", persist_result=False)
def suite(name: str, overrides: Overrides = None, root: str = ".") -> suite_results.Results:
    """Every agent of suite ``name`` on every dataset, what is missing of it. Results lie in evaluation/<name>/:

    ``rows.parquet`` has each answer, ``summary.parquet`` and ``.json`` the figures, ``index.html`` both as one page.
    """
    workspace = Workspace(Path(root))
    asked, agents = read_suite(Path(root), name, overrides or [])
    home = workspace.root / "runs" / "suites" / name
    datasets = [prepare(workspace, asked, agents, dataset, home) for dataset in asked.datasets]
    cells = [answer(asked, agent, dataset, home) for agent in agents for dataset in datasets]
    results = gathered(name, asked, cells)
    folder = workspace.root / "evaluation" / name
    suite_results.write(results, folder)
    with storage.whole_file(folder / "index.html") as path:
        path.write_text(suite_report.page(results), encoding="utf-8")
    if not log_cells(cells, results):
        console.print(f"MLflow has not all of suite {name}: the same command again logs what it lacks", soft_wrap=True)
    return results

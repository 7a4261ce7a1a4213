"""Build the data of an experiment (``mempo prepare``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from mempo.overrides import Overrides
from mempo.workspace import Workspace
from tasks.data import prepare_data, read_config


@flow(name="prepare", persist_result=False)
def prepare(overrides: Overrides = None, root: str = ".") -> dict[str, Any]:
    """Documents, questions of disjoint splits, and the truth behind them; returns their counts."""
    return prepare_data(Workspace(Path(root)), read_config(Path(root), overrides or []))

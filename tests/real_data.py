"""Rows of published datasets, where a folder of them is at hand: they are no part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("MEMPO_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))

needs_real_data = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no real datasets: {FOLDER} is no folder (MEMPO_TEST_DATA names another)"
)

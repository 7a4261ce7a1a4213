"""Places for the contract tests to store: each empty and of its own, those in S3 on one server for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.buckets import make_bucket, serving


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    with serving():
        yield make_bucket("contract")


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of its own."""
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{uuid4().hex}"
    return f"memory://{uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/a store"

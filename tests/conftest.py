"""The tiny policy and tokenizer as fixtures, made once a session."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.tiny import make_policy, make_tokenizer

# vLLM writes what it learns of a model's class into the home folder, unless told.
_CACHE = tempfile.TemporaryDirectory(prefix="mempo-vllm-", ignore_cleanup_errors=True)
os.environ["VLLM_CACHE_ROOT"] = _CACHE.name

# No test asserts a time: a busy machine would fail it.
settings.register_profile("mempo", deadline=None)
settings.load_profile("mempo")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """An ordinary Hugging Face folder: window 512, a vocabulary of about 420. Copy it before you change anything."""
    return make_policy(tmp_path_factory.mktemp("policy") / "tiny", tiny_tokenizer)

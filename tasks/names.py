"""Names and values as MLflow takes them, and secrets as it must not get them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mempo.journal import hidden

MAX_VALUE, MAX_NAME = 6000, 250  # MLflow's limits, in characters
_SECRET = re.compile(r"(^|[._-])(password|passwd|secret|api_?key|(access|auth|api)_?token|credentials?)$", re.I)


def metric_name(name: str) -> str:
    """``name`` as MLflow takes it: letters, digits and ``_-. :/`` stay, others become ``_``; no empty path part."""
    parts = [part for part in re.sub(r"[^\w\-. :/]", "_", name).split("/") if part.strip(".")]
    return "/".join(parts)[:MAX_NAME] or "_"


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"loop": {"seed": 0}}`` -> ``{"loop.seed": "0"}``; secrets left out, passwords in URLs hidden, values cut."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = metric_name(f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{name}.")
        elif not _SECRET.search(name):
            flat[name] = hidden(str(value))[:MAX_VALUE]
    return flat

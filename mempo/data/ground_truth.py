"""The answers of a row, however its dataset wrote them down."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

SEPARATOR = "<|answer_split|>"  # DeepResearcher's, between aliases
MAX_LITERAL_CHARS = 100_000
# ['a' 'b'], as numpy prints a list, is Python for ['ab'].
_JOINED = re.compile(r"""['"]\s+['"]""")
_OF_TEXTS = re.compile(r"""\s*[\[{]\s*['"]""")


def gold_list(value: Any) -> Any:
    """Aliases from a list, from ``{"target": ...}``, from text.

    Text is one answer, or aliases joined by ``SEPARATOR``, or a list of texts or such a ``target`` as JSON or as Python
    writes it. Anything else is handed back as it is, for the caller's type check to refuse. Raises ``ValueError`` for a
    list of texts that is damaged.
    """
    if isinstance(value, str):
        return _from_text(value) if value.strip()[:1] in {"[", "{"} else value.split(SEPARATOR)
    target = value.get("target") if isinstance(value, dict) else value
    return [target] if isinstance(target, str) else target


def _from_text(text: str) -> list[str]:
    for read in (json.loads, _literal):
        try:
            target = gold_list(read(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(target, list) and all(isinstance(entry, str) for entry in target):
            return target
    if _OF_TEXTS.match(text):
        raise ValueError("a list of answers that cannot be read")
    return [text]  # an interval, a set, a matrix: an answer that happens to begin with a bracket


def _literal(text: str) -> Any:
    """Raises ``ValueError`` for what is too long, ``SyntaxError`` for what is no literal."""
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError("too long for a literal")
    value = ast.literal_eval(text.strip())
    if _JOINED.search(text):
        raise ValueError("a list without commas")
    return value

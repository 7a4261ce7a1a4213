"""The types of the columns of question files: what is taken, in which forms, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from mempo.data.ground_truth import gold_list

MAX_CHARS = 100_000
MAX_ALIASES = 10_000


def _not_empty(value: str) -> str:
    if not (value := value.strip()):
        raise ValueError("is empty")
    return value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def distinct(golds: list[str]) -> list[str]:
    kept = list(dict.fromkeys(gold.strip() for gold in golds if gold.strip()))
    if not kept:
        raise ValueError("no answer that is not empty")
    return kept


def _records(*names: str) -> Callable[[Any], Any]:
    """Tuples of ``names`` from rows, records with these keys, columns of lists, or the JSON text of one of them."""

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            value = json.loads(value)
        if isinstance(value, dict):
            columns = [value.get(name) for name in names]
            if not all(isinstance(column, list) for column in columns):
                raise ValueError(f"expected columns of lists: {', '.join(names)}")
            return list(zip(*columns, strict=True))
        if isinstance(value, list):
            return [tuple(map(item.get, names)) if isinstance(item, dict) else item for item in value]
        return [] if value is None else value

    return convert


Plain = Annotated[str, Field(max_length=MAX_CHARS)]
Text = Annotated[Plain, AfterValidator(_not_empty)]
Id = Annotated[str, Field(max_length=500), BeforeValidator(_number_as_text)]
Aliases = Annotated[list[Plain], Field(max_length=MAX_ALIASES), AfterValidator(distinct)]
Golds = Annotated[Aliases, BeforeValidator(gold_list)]
Context = Annotated[list[tuple[Plain, list[Plain]]], BeforeValidator(_records("title", "sentences"))]
Facts = Annotated[list[tuple[Plain, int]], BeforeValidator(_records("title", "sent_id"))]
Supported = Annotated[
    list[tuple[Plain, Plain, bool]], BeforeValidator(_records("title", "paragraph_text", "is_supporting"))
]

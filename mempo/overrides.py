"""A flow's ``overrides``: a form in Prefect's pages, checked on submission, that becomes settings for ``load_config``.

The schema is that of ``Config`` without its defaults: what nobody fills in stays as params.yaml has it. Prefect's
server refuses unknown keys and bad values; what concerns several settings at once, the flow refuses as it starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, WithJsonSchema

from mempo.config import Config

_ESCAPED = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}  # JSON has them as they are, YAML refuses them


def settings(overrides: Any) -> Any:
    """``section.key=value`` for each value of nested sections; a list of such texts, and None, stay as they are.

    Sections and dictionaries are merged with those of params.yaml, key by key; values replace.
    """
    return list(_settings(overrides, Config)) if isinstance(overrides, Mapping) else overrides


def _settings(values: Mapping[str, Any], section: type[BaseModel], before: str = "") -> Iterator[str]:
    for key, value in values.items():
        kind = section.model_fields[key].annotation if key in section.model_fields else None
        if not isinstance(value, Mapping):
            yield _setting(before + key, value)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(value, kind, f"{before}{key}.")
        else:
            yield from (_setting(f"{before}{key}.{name}", entry) for name, entry in value.items())


def _setting(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_ESCAPED)}"


def _form(node: Any, parts: Mapping[str, Any]) -> Any:
    """A JSON schema without defaults, and without references: Prefect puts it where they would lead nowhere."""
    if isinstance(node, list):
        return [_form(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _form(parts[node["$ref"].rpartition("/")[2]], parts)
    if node.get("type") == "boolean":  # a choice may be left open; the form's switch says false where nobody touched it
        node = {"title": node["title"], "enum": [True, False]}
    return {key: _form(value, parts) for key, value in node.items() if key not in ("default", "$defs")}


_SCHEMA = Config.model_json_schema()

Overrides = Annotated[
    list[str] | None, BeforeValidator(settings), WithJsonSchema(_form(_SCHEMA, _SCHEMA.get("$defs", {})))
]

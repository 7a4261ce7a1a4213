"""A form's nested values become the settings that the command line takes, and nothing that nobody filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies
from pydantic import TypeAdapter

from mempo.overrides import Overrides, settings
from mempo.params import _parse_override, load_config

SCHEMA = TypeAdapter(Overrides).json_schema()


def test_sections_become_settings_and_untouched_ones_nothing() -> None:
    form = {"loop": {"num_rounds": 3}, "runtime": {"vllm": {"servers": ["http://a:1"]}, "deepspeed": {}}, "ablate": {}}
    assert settings(form) == ["loop.num_rounds=3", 'runtime.vllm.servers=["http://a:1"]']
    assert settings({"preset": "published"}) == ['preset="published"']
    assert settings(["loop.num_rounds=3"]) == ["loop.num_rounds=3"] and settings(None) is None


def test_an_entry_of_a_dictionary_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("policies: {a: {loop: {seed: 1}}, b: {}}")
    config = load_config(file, settings({"policies": {"b": {"loop": {"seed": 2}}, "c": {}}}))
    assert config.policies == {"a": {"loop": {"seed": 1}}, "b": {"loop": {"seed": 2}}, "c": {}}


@given(
    strategies.text(strategies.characters(exclude_categories=["Cs"]))
    | strategies.floats(allow_nan=False, allow_infinity=False)
)
def test_every_value_arrives_as_it_was_given(value: Any) -> None:
    (text,) = settings({"prompt": {"system": value}})
    assert _parse_override(text) == (["prompt", "system"], value)


@pytest.mark.parametrize("wrong", [{"loop": {"num_rondes": 3}}, {"loop": {"num_rounds": 0}}, {"looop": {}}, ["a=1"]])
def test_the_schema_refuses_what_the_configuration_would(wrong: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_the_schema_fills_nothing_in() -> None:
    jsonschema.validate({"loop": {"num_rounds": 3}, "advantage": {"normalize_std": False}}, SCHEMA)
    assert "'default':" not in str(SCHEMA) and "$ref" not in str(SCHEMA)
    # A switch of Prefect's form would send false where nobody touched it.
    assert SCHEMA["properties"]["format"]["properties"]["require_memory"]["enum"] == [True, False]

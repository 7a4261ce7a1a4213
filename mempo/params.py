"""params.yaml and overrides become a checked ``Config``; every refusal names the key and the nearest right one."""

from __future__ import annotations

import copy
import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mempo.config import Advantage, Config, LossConfig, MemReward


class ConfigError(ValueError):
    """A message for the user: the key, what is wrong with it, the nearest right one."""


PUBLISHED: dict[str, dict[str, Any]] = {
    # The published code's side of every switch in docs/algorithm.md.
    "format": {"require_memory": False},
    "scoring": {"baseline": "history", "full_scorer": "actor", "lookahead": 0, "aliases": "first"},
    "reward": {"kind": "em", "normalizer": "squad", "format_credit": 0.0, "require_format": True},
    "mem_reward": MemReward(answer_tokens="last_four").model_dump(),
    "advantage": Advantage().model_dump(),
    "loss": LossConfig(old_logprobs="recomputed").model_dump(),
    "loop": {"group_size": 16},
}


# What policies are compared on, or start from: a difference in one policy would reach nothing, or spoil the comparison.
SHARED = {"data", "model", "warmstart", "evaluation", "ablate", "policies", "suites"}


def load_config(
    path: Path | str | None = "params.yaml", overrides: Iterable[str] = (), *, policy: str | None = None
) -> Config:
    """Read and check ``path``, if any; ``overrides`` are ``section.key=value`` with YAML values.

    Precedence, last wins: defaults, the file, ``preset``, the policy's own overrides, ``overrides``. Raises
    ``ConfigError``.
    """
    values = {} if path is None else _read_yaml(Path(path))
    settings = [_parse_override(text) for text in overrides]
    preset = next((value for keys, value in reversed(settings) if keys == ["preset"]), values.get("preset"))
    if preset == "published":
        # A preset asked for by name wins over the file where both speak; the file still decides sizes.
        _merge(values, PUBLISHED)
    for keys, value in settings:
        _assign(values, keys, value)
    config = checked(values)
    policies = {name: _policy_config(values, name, settings) for name in config.policies}
    if policy is None:
        return config
    if policy not in policies:
        raise ConfigError(f"policies.{policy}: no such policy{nearest(policy, policies)}")
    return policies[policy]


def overridden(config: Config, overrides: Iterable[str]) -> Config:
    """``config`` with ``section.key=value`` settings on top; ``preset=published`` brings its values, the others win."""
    values = config.model_dump()
    settings = [_parse_override(text) for text in overrides]
    if (["preset"], "published") in settings:
        _merge(values, PUBLISHED)
    for keys, value in settings:
        _assign(values, keys, value)
    return checked(values)


def differing(config: Config, *differences: Mapping[str, Any]) -> Config:
    """``config`` with nested sections on top, the last wins; a preset lies under all of them, as under a policy's."""
    values, own = config.model_dump(), dict[str, Any]()
    for given in differences:
        _merge(own, given)
    _differ(values, own)
    return checked(values)


def keys_of(values: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value in nested sections."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from keys_of(value, (*before, key))
        else:
            yield (*before, key)


def refuse_overrides(overrides: Iterable[str], decided: Mapping[tuple[str, ...], str]) -> None:
    """Raises ``ConfigError`` for an override of a key, of its section or of what is below it, that ``decided`` holds.

    ``decided``: path -> who decides it.
    """
    for text in overrides:
        keys, _ = _parse_override(text)
        for path, who in decided.items():
            if all(a == b for a, b in zip(keys, path, strict=False)):
                raise ConfigError(f"--set {'.'.join(keys)}: {who} decides {'.'.join(path)}")


def _policy_config(values: dict[str, Any], name: str, settings: list[tuple[list[str], Any]]) -> Config:
    merged = copy.deepcopy(values)
    own = merged["policies"][name]
    for section in SHARED.intersection(own):
        raise ConfigError(f"policies.{name}.{section}: one for all policies, it stands at the top")
    merged["policies"] = {name: own}
    _differ(merged, own)
    for keys, value in settings:
        if keys[0] != "policies":
            _assign(merged, keys, value)
    try:
        return checked(merged)
    except ConfigError as error:
        raise ConfigError(f"policies.{name}: {error}") from None


def _differ(values: dict[str, Any], own: Mapping[str, Any]) -> None:
    if own.get("preset") == "published":
        _merge(values, PUBLISHED)
    _merge(values, own)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        # YAML 1.2 by ruamel: PyYAML reads 1e-6 as text.
        values = YAML(typ="safe", pure=True).load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except (YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections, found {type(values).__name__}")
    return values


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, mark, value = text.partition("=")
    if not mark or not key:
        raise ConfigError(f"--set {text}: write it as section.key=value")
    try:
        return key.split("."), YAML(typ="safe", pure=True).load(value)
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {text}: {' '.join(str(error).split())}") from None


def _assign(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(keys)}: {key} is a value, not a section")
        values = inner
    values[keys[-1]] = value


def _merge(values: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = dict(value) if isinstance(value, Mapping) else value


def checked(values: dict[str, Any]) -> Config:
    """``Config`` from nested values. Raises ``ConfigError``, a line for each key that is wrong."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(dict(problem)) for problem in error.errors())) from None


def _explain(problem: dict[str, Any]) -> str:
    location = [str(part) for part in problem["loc"]]
    name = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"{name}: unknown key{nearest(location[-1], _section_at(location[:-1]).model_fields)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error" and message.startswith(name.split(".")[0]):
        return message  # it names the key by itself
    if problem["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name}: {message}, got {reprlib.repr(problem['input'])}"


def _section_at(location: Iterable[str]) -> Any:
    """The section class that stands at a path of keys, of names in mappings and of places in lists."""
    found: Any = Config
    for part in location:
        found = _bare(found)
        if kinds := get_args(found):
            found = kinds[0] if part.isdigit() else kinds[-1]
        else:
            found = found.model_fields[part].annotation
    return _bare(found)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The end of a message about a name that is not there: the candidate it may have meant, else all of them."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(candidates))}"

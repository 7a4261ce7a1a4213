"""Who answers the questions of a suite: a policy, and the settings under which it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mempo.config import UNTRAINED, Config
from mempo.params import SHARED, ConfigError, differing, keys_of, load_config, nearest, refuse_overrides
from mempo.suite import Suite
from mempo.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Agent:
    """``policy``: its folder, or the id of a hub."""

    name: str
    policy: Path
    config: Config


def read_suite(root: Path, name: str, overrides: Sequence[str] = ()) -> tuple[Suite, list[Agent]]:
    """Suite ``name`` of params.yaml and its agents. Raises ``ConfigError`` for what is wrong in any of them.

    An agent's settings, last wins: params.yaml, its policy's, ``overrides``, the suite's ``settings``, its own.
    """
    file = root / "params.yaml"
    shared = load_config(file, overrides)
    if name not in shared.suites:
        raise ConfigError(f"suites.{name}: no such suite{nearest(name, shared.suites)}")
    suite = shared.suites[name]
    return suite, [_agent(root, f"suites.{name}", suite, agent, shared, overrides) for agent in suite.agents]


def _agent(root: Path, where: str, suite: Suite, name: str, shared: Config, overrides: Sequence[str]) -> Agent:
    policy = str(suite.agents[name]["policy"])
    own = {key: value for key, value in suite.agents[name].items() if key != "policy"}
    for place, given in ((f"{where}.settings", suite.settings), (f"{where}.agents.{name}", own)):
        if wrong := sorted(SHARED.intersection(given)):
            raise ConfigError(f"{place}.{wrong[0]}: one for all agents, it stands at the top")
        refuse_overrides(overrides, {keys: place for keys in keys_of(given)})
    try:
        config = load_config(root / "params.yaml", overrides, policy=policy if policy in shared.policies else None)
        config = differing(config, suite.settings, own)
    except ConfigError as error:
        raise ConfigError(f"{where}.agents.{name}: {error}") from None
    try:
        return Agent(name, policy_folder(root, policy, shared), config)
    except ConfigError as error:
        raise ConfigError(f"{where}.agents.{name}.policy: {error}") from None


def policy_folder(root: Path, policy: str, shared: Config) -> Path:
    """Where ``policy`` lies: a name of params.yaml, ``warmstart``, ``pretrained``, a folder, or the id of a hub."""
    if policy == "pretrained":
        if shared.model.path is None:
            raise ConfigError("pretrained: model.path is null, this policy starts from scratch")
        return Path(shared.model.path)
    known = {*shared.policies, *UNTRAINED}
    if policy in known:
        return Workspace(root).checkpoint(policy)
    if "/" not in policy and not Path(policy).exists():
        raise ConfigError(f"{policy!r} is no policy and no path{nearest(policy, known)}")
    return Path(policy)

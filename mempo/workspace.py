"""Where things lie: DVC's outputs under a root, and the scratch folder of a live run.

``data/ checkpoints/ results/ metrics/ report/`` are DVC outputs; ``runs/<name>-<key8>/`` is scratch that git and DVC
ignore and that survives ``dvc repro``. The key hashes all that changes results: another setting is another folder.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mempo import lease, storage
from mempo.config import OF_MANY, SCHEMA, Config, digest
from mempo.params import ConfigError, checked
from mempo.share import Share
from mempo.store import Store

# Sections that change no result: how long, where, how fast, how shown.
_FREE = OF_MANY | {"diagnose", "evaluation", "preset", "shards", "storage", "tracking"}
_FREE_KEYS = {
    "loop": {"num_rounds", "keep_every", "dev_every"},
    "loss": {"max_mismatch"},
    "runtime": {"max_batch", "gradient_checkpointing", "vllm", "deepspeed"},
    "search": {"urls", "deadline_s", "retries", "cache_size"},
    "warmstart": {"save_every"},
}


@dataclass(frozen=True, slots=True)
class Workspace:
    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data" / "questions"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def report(self) -> Path:
        return self.root / "report"

    def checkpoint(self, name: str, which: str = "final") -> Path:
        return self.root / "checkpoints" / name / which

    def results(self, name: str) -> Path:
        return self.root / "results" / name

    def require(self, *policies: str) -> None:
        """Raises ``FileNotFoundError`` naming what is missing, the data or one of ``policies``, and what makes it."""
        named = [name for name in policies if name != "pretrained"]
        makers = {name: "warmstart" if name == "warmstart" else f"train {name}" for name in named}
        needed = {self.data: "prepare"} | {self.checkpoint(name): maker for name, maker in makers.items()}
        for path, maker in needed.items():
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing; `mempo {maker}` makes it")

    def run(self, name: str, config: Config, inputs: dict[str, str], sections: Collection[str] = ()) -> Run:
        """The run folder of ``name`` under this configuration and these inputs (name -> content hash).

        ``sections`` are those that its results depend on; none named: all.
        """
        parameters = result_parameters(config)
        chosen = {section: parameters[section] for section in sections or parameters}
        key = digest({"config": chosen, "inputs": inputs, "schema": SCHEMA})
        run = Run(name, self.root / "runs" / f"{name}-{key}", config, self)
        if not run.config_file.exists():
            told = config.model_dump(mode="json", exclude=OF_MANY)
            described = {"config": told, "inputs": inputs, "schema": SCHEMA}
            storage.write_json(run.config_file, described | {"versions": package_versions()})
        return run


@dataclass(frozen=True, slots=True)
class Run:
    """A live run: round_NNNN/ with one file a finished step, policy_NNNN/ with the policy that entered round NNNN."""

    name: str
    folder: Path
    config: Config
    workspace: Workspace

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def share(self) -> Share:
        return Share(self.workspace.root, self.config.storage.url)

    def round(self, index: int) -> Path:
        return self.folder / f"round_{index:04d}"

    def files(self, index: int) -> list[Path]:
        """The files of a round, records before what says that they are whole."""
        return sorted(filter(Path.is_file, self.round(index).glob("*")), key=lambda file: file.suffix == ".json")

    def policy(self, version: int) -> Path:
        """Version 0 is the policy that training starts from."""
        return self.folder / f"policy_{version:04d}" if version else self.workspace.checkpoint("warmstart")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time on a policy of a workspace: two would write the same files.

        The second waits, saying for whom, and then finds the work done: so does a command that is given again after
        only its parent was killed. One that is killed lets go, on another host once ``storage.lease_s`` has passed.
        """
        config = self.config.storage
        what = f"{self.name} in {config.url or self.workspace.root.resolve()}"
        with lease.held(*self.lock, config.lease_s, what=what):
            yield

    @property
    def lock(self) -> tuple[Store, str]:
        """The store and the name there of the lock that ``alone`` holds."""
        return Store(self.config.storage.url or self.workspace.root), f"runs/{self.name}.lock"

    def join(self) -> None:
        """Where hosts share a store: the rounds so far and the newest policy from there, and to there what it lacks."""
        if self.share.url is None:
            return
        self.share.agree(self.workspace.data, self.policy(0))
        self.share.fetch(self.folder / "mlflow.json")
        self.share.send(self.config_file)
        for index in range(self.config.loop.num_rounds):
            there = self.share.units(self.round(index))
            self.share.fetch(*there)
            self.share.send(*(file for file in self.files(index) if file not in there))
            if not (self.round(index) / "update.json").exists():
                self.share.fetch(self.policy(index))
                return
        self.share.fetch(self.policy(self.config.loop.num_rounds))


def recorded(run_folder: Path) -> Config:
    """The configuration that a run was made with. Raises ``ConfigError`` where another version of the code wrote it."""
    file = run_folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{run_folder}: no run folder, config.json is missing")
    found = storage.read_json(file)
    if not (isinstance(found, dict) and isinstance(found.get("config"), dict)):
        raise ConfigError(f"{file}: no record of a run")
    try:
        return checked(found["config"])
    except ConfigError as error:
        raise ConfigError(f"{run_folder}: written by another version: {error}") from None


def result_parameters(config: Config) -> dict[str, Any]:
    """The part of the configuration that can change a result."""
    values = config.model_dump(mode="json", exclude=_FREE)
    for section, keys in _FREE_KEYS.items():
        values[section] = {key: value for key, value in values[section].items() if key not in keys}
    return values


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("mempo", "torch", "transformers", "tokenizers", "numpy", "bm25s", "prefect", "mlflow", "dvc"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | ({"commit": commit} if (commit := _git_commit()) else {})


def _git_commit() -> str:
    """Of this checkout, with ``+`` where files differ from it; empty where the package lies in no checkout."""
    checkout = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

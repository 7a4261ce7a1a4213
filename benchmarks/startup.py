"""What a command costs before it works, and what orchestration costs in a training."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, Skipped


def run(folder: Path, full: bool) -> Iterator[Row]:
    help_s, plain_s = (_fastest([sys.executable, *rest]) for rest in (["-m", "mempo.cli", "--help"], ["-c", "pass"]))
    yield Row("`mempo --help`", help_s, "lower", f"an empty program takes {plain_s:.2f} s", 0.5, unit="s")
    trained = Path("metrics/train.json")
    if not trained.exists():
        raise Skipped("what orchestration costs stands in metrics/train.json, which make demo makes")
    found = json.loads(trained.read_text(encoding="utf-8"))["mempo"]
    seconds, share = orchestration(found)
    of = f"Prefect, MLflow, files in {found['rounds']} rounds of the demo's `mempo`, servers' start apart"
    yield Row("orchestration, share of a tiny round", 100 * share, "lower", of, 15.0, "%")
    told = f"{seconds:.2f} s a round: {of}"
    yield Row("orchestration, share of a round of 60 s", 100 * seconds / 60, "lower", told, 5.0, "%")


def orchestration(trained: dict[str, Any]) -> tuple[float, float]:
    """Seconds a round, and their share of a round, of a policy's entry in metrics/train.json.

    share = 1 - work / wall, so the rest is work * share / (1 - share), where work is what all steps took.
    """
    share, work = trained["orchestration_share"], sum(trained["seconds"].values()) / trained["rounds"]
    return work * share / (1 - share), share


def _fastest(command: list[str], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - started)
    return min(found)

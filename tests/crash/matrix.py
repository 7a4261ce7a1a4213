"""``make crash-test``: everything that can die is killed, at every change of a file and at seeded random moments.

Prints a line a kill and a table at the end; exit code 1 where anything differs from an undisturbed training.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.crash import disks, kinds, workers
from tests.crash.experiment import Experiment
from tests.crash.table import Table

Kind = Callable[[Experiment, Table], None]
ALONE = ("workers", "prefect_server", "mlflow_server")
KINDS = ("change", "full", "disk", "limit", "random", "ranks", "vllm", "served", "clock", *ALONE)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seed", type=int, default=0, help="of the random moments")
    asked.add_argument("--jobs", type=int, default=2, help="trainings side by side")
    asked.add_argument("--only", nargs="*", choices=KINDS, help="kinds of kills")
    asked.add_argument("--share", type=int, default=1, help="every n-th change of a file instead of every one")
    asked.add_argument("--chains", type=int, default=8, help="trainings with kills at random moments")
    asked.add_argument("--home", type=Path, default=Path("runs/crash"), help="takes all that is made, and table.md")
    options = asked.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it, and children inherit that
    shutil.rmtree(options.home, ignore_errors=True)
    experiment, table = Experiment(options.home.resolve()), Table()
    try:
        experiment.prepare()
        began = time.monotonic()
        experiment.straight()
        seconds = time.monotonic() - began
        print(f"one undisturbed training: {seconds:.0f} s", flush=True)
        carry_out(plan(options, seconds), options, experiment, table)
    finally:
        experiment.close()
        print(table.markdown())
        (options.home / "table.md").write_text(table.markdown())
    return 1 if table.differences else 0


def carry_out(plan: dict[str, Kind], options: argparse.Namespace, experiment: Experiment, table: Table) -> None:
    """Trainings side by side; those that need workers or take a server away come alone, at the end."""
    chosen = {name: kind for name, kind in plan.items() if name.partition("-")[0] in (options.only or KINDS)}
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda kind: kind(experiment, table), [k for name, k in chosen.items() if name not in ALONE]))
    for name in ALONE:
        if name in chosen:
            chosen[name](experiment, table)


def plan(options: argparse.Namespace, seconds: float) -> dict[str, Kind]:
    """What is to be done, by name; the number of jobs cuts the points into chains."""
    jobs, share = options.jobs, options.share
    found: dict[str, Kind] = {}
    for index in range(jobs):
        found[f"change-{index}"] = partial(kinds.every_change, part=f"{index * share}/{jobs * share}")
    found["full"] = partial(kinds.disk_full, part=f"0/{12 * share}")
    found |= {"disk": disks.disk, "limit": kinds.small_files}
    for index in range(options.chains):
        dice = random.Random(f"{options.seed}/{index}")
        found[f"random-{index}"] = partial(kinds.random_moments, dice=dice, seconds=seconds, kills=6)
    dice = random.Random(options.seed)
    found["ranks"] = partial(kinds.ranks, dice=dice)
    found["clock"] = partial(kinds.clock, dice=dice)
    found |= {"vllm": kinds.vllm_driver, "served": kinds.vllm_servers}
    found["workers"] = workers.workers
    found |= {"prefect_server": kinds.prefect_server, "mlflow_server": kinds.mlflow_server}
    return found


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks [NAMES]``: measure, and rewrite these rows of results.json and RESULTS.md."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path

from benchmarks import rows

NAMES = (
    "scoring", "smollm2", "rollout", "update", "ranks", "memory", "reward_share", "scaling", "growth", "startup",
    "vllm", "trl",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without one")
    parser.add_argument("--full", action="store_true", help="sizes that take longer than ten minutes in all")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a ratio got worse by 20 %%")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - set(NAMES)):
        parser.error(f"{unknown[0]}: no such benchmark; known: {', '.join(NAMES)}")
    found, failed = measured(asked.names or NAMES, asked.full)
    if failed:
        print(f"failed: {', '.join(failed)}")
    if not asked.check:
        rows.write(found)
        return int(bool(failed))
    problems = rows.worse(found, rows.read())
    print("\n".join(["worse:", *problems] if problems else ["no ratio got worse by more than 20 %"]))
    return int(bool(failed or problems))


def measured(names: Iterable[str], full: bool) -> tuple[list[rows.Row], list[str]]:
    """The rows of these benchmarks, and the names of those that raised; what a benchmark gave before it did, stays."""
    found: list[rows.Row] = []
    failed: list[str] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="mempo-bench-") as folder:
            try:
                for row in importlib.import_module(f"benchmarks.{name}").run(Path(folder), full):
                    found.append(rows.stamped(row))
                    print(f"{row.name}: {row.value:.3g} {row.unit} ({row.detail})", flush=True)
            except rows.Skipped as reason:
                print(f"{name}: skipped: {reason}", flush=True)
            except Exception:
                traceback.print_exc()
                failed.append(name)
    return found, failed


if __name__ == "__main__":
    sys.exit(main())

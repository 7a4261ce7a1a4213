"""``python -m benchmarks [NAMES]``: measure, and rewrite these rows of results.json and RESULTS.md."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from benchmarks import rows

NAMES = ("scoring", "rollout", "update", "startup")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without one")
    parser.add_argument("--full", action="store_true", help="sizes that take longer than ten minutes in all")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a ratio got worse by 20 %%")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - set(NAMES)):
        parser.error(f"{unknown[0]}: no such benchmark; known: {', '.join(NAMES)}")
    found = []
    with tempfile.TemporaryDirectory(prefix="mempo-bench-") as folder:
        for name in asked.names or NAMES:
            for row in importlib.import_module(f"benchmarks.{name}").run(Path(folder), asked.full):
                found.append(rows.stamped(row))
                print(f"{row.name}: {row.value:.3g} {row.unit} ({row.detail})", flush=True)
    if not asked.check:
        rows.write(found)
        return 0
    problems = rows.worse(found, rows.read())
    print("\n".join(["worse:", *problems] if problems else ["no ratio got worse by more than 20 %"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

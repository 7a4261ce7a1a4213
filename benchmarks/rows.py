"""What benchmarks measured: rows in results.json, and the same as tables in RESULTS.md."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
BEGIN, END = "<!-- rows: python -m benchmarks -->\n", "<!-- end of rows -->\n"
WORSE = 0.2  # a ratio that got worse by more fails the check


class Skipped(Exception):
    """What a benchmark needs is not on this machine: no row, and no failure."""


@dataclass(frozen=True, slots=True)
class Row:
    """``value`` is a ratio of two things measured in one run, or a plain figure with its ``unit``.

    ``better``: which way is good. ``detail``: the two things, in a few words.
    """

    name: str
    value: float
    better: Literal["higher", "lower"]
    detail: str
    target: float | None = None
    unit: str = "x"
    date: str = ""
    machine: str = ""

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def stamped(row: Row) -> Row:
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, torch {version('torch')}, transformers {version('transformers')}"
    return Row(**(asdict(row) | {"date": date.today().isoformat(), "machine": machine}))


def read(file: Path = HERE / "results.json") -> dict[str, Row]:
    if not file.exists():
        return {}
    return {values["name"]: Row(**values) for values in json.loads(file.read_text(encoding="utf-8"))}


def write(rows: Iterable[Row], folder: Path = HERE) -> None:
    """The rows take the place of those of the same names; RESULTS.md gets the whole table."""
    known = read(folder / "results.json") | {row.name: row for row in rows}
    text = json.dumps([asdict(row) for row in known.values()], indent=1, ensure_ascii=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    page = folder / "RESULTS.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table(known.values()) + END + after, encoding="utf-8")


def table(rows: Iterable[Row]) -> str:
    lines = ["| what | measured | target | | date |", "|---|---|---|---|---|"]
    for row in rows:
        sign = {"higher": "≥", "lower": "≤"}[row.better]
        target = "" if row.target is None else f"{sign} {row.target:g} {row.unit}"
        told = {None: "", True: "reached", False: "**missed**"}[row.reached]
        lines.append(f"| {row.name}: {row.detail} | {row.value:.3g} {row.unit} | {target} | {told} | {row.date} |")
    return "\n".join(lines) + "\n"


def worse(new: Iterable[Row], known: dict[str, Row]) -> list[str]:
    """A line for each ratio that is worse than before by more than ``WORSE``; plain figures are of a machine."""
    found = []
    for row in new:
        if row.unit == "x" and (old := known.get(row.name)):
            change = row.value / old.value if row.better == "higher" else old.value / row.value
            if change < 1 - WORSE:
                found.append(f"{row.name}: {row.value:.3g} x, before {old.value:.3g} x ({old.date})")
    return found

"""The table of a crash run: what was killed, when, what came out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

from tests.crash.experiment import Training


@dataclass
class Table:
    rows: list[tuple[str, str, list[str]]] = field(default_factory=list)
    ends: list[tuple[str, int, list[str]]] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)
    _began: float = field(default_factory=time.monotonic)

    def kill(self, what: str, when: str, wrong: list[str]) -> None:
        """A kill and what was wrong right after it; printed as it comes."""
        with self._lock:
            self.rows.append((what, when, wrong))
            seconds = time.monotonic() - self._began
            print(
                f"{len(self.rows):4d} {seconds:5.0f} s  {what} | {when} | {'; '.join(wrong) or 'nothing wrong'}",
                flush=True,
            )

    def ended(self, kind: str, code: int, training: Training, *, known: str | None = None) -> None:
        """The last command of a training, and what its result differs in from the undisturbed one, but for lines that
        begin with ``known``.
        """
        wrong = training.at_the_end() if code == 0 else [f"exit code {code}: {' / '.join(training.said())[-300:]}"]
        wrong = [line for line in wrong if known is None or not line.startswith(known)]
        with self._lock:
            self.ends.append((kind, code, wrong))
            print(f"     {kind}, to the end | {'; '.join(wrong) or 'equal to the undisturbed training'}", flush=True)

    @property
    def differences(self) -> int:
        return sum(bool(wrong) for _, _, wrong in [*self.rows, *self.ends])

    def markdown(self) -> str:
        """Kills by what was killed, trainings by what was done to them."""
        lines = ["| killed | when | times | wrong right after |", "|---|---|---|---|"]
        for what in sorted({what for what, _, _ in self.rows}):
            mine = [(when, wrong) for other, when, wrong in self.rows if other == what]
            when = mine[0][0] if len(mine) == 1 else f"{mine[0][0]} .. {mine[-1][0]}"
            lines.append(f"| {what} | {when} | {len(mine)} | {_count(mine)} |")
        lines += ["", "| trainings broken off by | ended | unlike the undisturbed one |", "|---|---|---|"]
        for kind in sorted({kind for kind, _, _ in self.ends}):
            ends = [(code, wrong) for other, code, wrong in self.ends if other == kind]
            lines.append(f"| {kind} | {sum(code == 0 for code, _ in ends)} of {len(ends)} | {_count(ends)} |")
        return "\n".join([*lines, "", f"{len(self.rows)} times broken off, {self.differences} differences.", ""])


def _count(rows: Sequence[tuple[object, list[str]]]) -> int:
    return sum(bool(wrong) for _, wrong in rows)

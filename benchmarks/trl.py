"""A round of ours against a step of TRL's GRPOTrainer, one update, no reference model: of one turn, and of several.

Both run in one process of the environment that has TRL (``trl_sides``, ``trl_tools``), with one thread in float32.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import trl_sides, trl_tools
from benchmarks.rows import HERE, Row, Skipped
from benchmarks.synthetic import VOCABULARY
from benchmarks.trl_sides import GROUP_SIZE, NEW_TOKENS, Found
from benchmarks.trl_tools import TURN_TOKENS, TURNS

PYTHON = HERE.parent / ".venv-trl/bin/python"


def run(folder: Path, full: bool) -> Iterator[Row]:
    if not PYTHON.exists():
        raise Skipped("TRL has an environment of its own, .venv-trl: make test-adapters makes it")
    what = f"{NEW_TOKENS} tokens sampled and trained, of {VOCABULARY:,}"
    yield from _rows("a round against TRL", trl_sides, what, folder, full, 1.3)
    what = (
        f"{TURNS} turns x {TURN_TOKENS} tokens sampled and trained, all in context; an update of TRL reads {{held:,}} "
        "tokens, a trajectory as one sequence, all through the vocabulary head; ours {read:,}, a turn as one sample "
        "with all before it, the trained alone through the head"
    )
    yield from _rows("a multi-turn round against TRL's tools path", trl_tools, what, folder, full, None)


def _rows(name: str, sides: Any, what: str, folder: Path, full: bool, target: float | None) -> Iterator[Row]:
    for size in list(sides.SIZES)[: None if full else 1]:
        place = folder / f"{sides.__name__} {size}"
        command = [PYTHON, "-W", "ignore", "-m", sides.__name__, size, place]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        ours, theirs = json.loads((place / "found.json").read_text(encoding="utf-8"))
        agree(ours, theirs)
        detail = (
            f"{ours['seconds']:.2f} CPU-s a round against {theirs['seconds']:.2f} a step of TRL {theirs['version']}; "
            f"{sides.SIZES[size][1]} prompts x {GROUP_SIZE} x {what.format(**ours)}"
        )
        yield Row(f"{name}, {size}", theirs["seconds"] / ours["seconds"], "higher", detail, target)


def agree(ours: Found, theirs: Found) -> None:
    """Raises ``AssertionError`` where the two did not sample and hold as many tokens of the same entropy."""
    for key, allowed in {"sampled": 0, "held": 0, "entropy": 0.01}.items():
        if abs(ours[key] - theirs[key]) > allowed:
            raise AssertionError(f"{key}: {ours[key]} here, {theirs[key]} in TRL")

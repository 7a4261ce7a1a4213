"""A round of ours against a step of TRL's GRPOTrainer: single turn, one update, no reference model.

Both run in one process of the environment that has TRL (benchmarks/trl_sides.py), with one thread in float32.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import HERE, Row, Skipped
from benchmarks.synthetic import VOCABULARY
from benchmarks.trl_sides import GROUP_SIZE, NEW_TOKENS, SIZES

PYTHON = HERE.parent / ".venv-trl/bin/python"


def run(folder: Path, full: bool) -> Iterator[Row]:
    if not PYTHON.exists():
        raise Skipped("TRL has an environment of its own, .venv-trl: make test-adapters makes it")
    for size in SIZES if full else list(SIZES)[:1]:
        place = folder / size.split()[0]
        command = [PYTHON, "-W", "ignore", "-m", "benchmarks.trl_sides", size, place]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        ours, theirs = json.loads((place / "found.json").read_text(encoding="utf-8"))
        for key, allowed in {"sampled": 0, "held": 0, "entropy": 0.01}.items():
            if abs(ours[key] - theirs[key]) > allowed:
                raise AssertionError(f"{key}: {ours[key]} here, {theirs[key]} in TRL")
        detail = (
            f"{ours['seconds']:.2f} CPU-s a round against {theirs['seconds']:.2f} a step of TRL {theirs['version']}; "
            f"{SIZES[size][1]} prompts x {GROUP_SIZE} x {NEW_TOKENS} tokens sampled and trained, of {VOCABULARY:,}"
        )
        yield Row(f"a round against TRL, {size}", theirs["seconds"] / ours["seconds"], "higher", detail, 1.3)

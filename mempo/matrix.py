"""Which trainings an ablation is made of: ``params.yaml``'s ``ablate`` as cells, checked before any of them runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempo.params import ConfigError, load_config

# Cells run side by side, so each keeps to one thread, and they have an MLflow experiment of their own.
SIDE_BY_SIDE = ("warmstart.num_threads=1", "tracking.experiment=mempo-ablation")
QUICK_VARIANTS, QUICK_ROUNDS = 6, 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant at one seed and mix; ``settings`` on top of ``root``/params.yaml are all that it is made by."""

    root: Path
    study: Path
    mix: str
    seed: int
    variant: str
    settings: tuple[str, ...]

    @property
    def home(self) -> Path:
        """The workspace of a seed and mix: its variants share data and warm start."""
        return self.root / "runs" / "ablate" / self.mix / f"seed_{self.seed}"

    @property
    def folder(self) -> Path:
        return self.study / self.mix / f"seed_{self.seed}" / self.variant

    @property
    def failure(self) -> Path:
        """What the last try failed of; no file where none did."""
        return self.folder.with_name(f"{self.variant}.failed.txt")

    @property
    def label(self) -> str:
        return f"{self.mix}/{self.seed}/{self.variant}"


def study_folder(root: Path, quick: bool = False) -> Path:
    """Where the finished cells lie; those of a quick look apart, for they are shorter."""
    return root / ("ablation-quick" if quick else "ablation")


def matrix(
    root: Path,
    overrides: Sequence[str] = (),
    *,
    quick: bool = False,
    mixes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    variants: Sequence[str] | None = None,
) -> list[Cell]:
    """All cells of ``ablate`` in params.yaml, or of the named part: seed by seed, so that whole rows end together.

    ``quick``: the first mix and seed, the first six variants, eight rounds. Raises ``ConfigError`` for a variant that
    is not there and for one whose settings are wrong.
    """
    asked = load_config(root / "params.yaml", overrides).ablate
    names = list(variants or asked.variants)
    for name in names:
        if name not in asked.variants:
            raise ConfigError(f"ablate.variants: no variant {name!r}; known: {', '.join(asked.variants)}")
    for mix in mixes or asked.mixes:
        if mix not in asked.targets:
            raise ConfigError(f"ablate.targets: no EM whose cost is told for mix {mix!r}")
    chosen: tuple[Sequence[Any], ...] = (seeds or asked.seeds, mixes or asked.mixes, names)
    if quick:
        chosen = (chosen[0][:1], chosen[1][:1], names[:QUICK_VARIANTS])
    short = [f"loop.num_rounds={QUICK_ROUNDS}"] if quick else []
    cells = []
    for seed in chosen[0]:
        for mix in chosen[1]:
            seeded = [f"data.mix={mix}", f"warmstart.seed={seed}", f"loop.seed={seed}", *SIDE_BY_SIDE, *short]
            for name in chosen[2]:
                policy = f"policies.{name}={json.dumps(asked.variants[name])}"
                settings = (*seeded, *overrides, policy)
                if seed == chosen[0][0]:  # a seed makes no setting wrong, and reading all of them takes seconds
                    load_config(root / "params.yaml", settings, policy=name)
                cells.append(Cell(root, study_folder(root, quick), str(mix), int(seed), name, settings))
    return cells

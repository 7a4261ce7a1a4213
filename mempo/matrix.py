"""Which trainings an ablation is made of: ``params.yaml``'s ``ablate`` as cells, checked before any of them runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mempo.config import Ablate, digest
from mempo.params import ConfigError, keys_of, load_config, refuse_overrides
from mempo.workspace import result_parameters

# Cells run side by side, so each keeps to one thread, and they have an MLflow experiment of their own.
SIDE_BY_SIDE = ("warmstart.num_threads=1", "tracking.experiment=mempo-ablation")
# What a cell's place in the matrix decides.
OWN = {("data", "mix"): "ablate.mixes", ("warmstart", "seed"): "ablate.seeds", ("loop", "seed"): "ablate.seeds"}
QUICK_VARIANTS, QUICK_ROUNDS = 6, 8


class Made(BaseModel):
    """``cell.json``: which cell it is, what made it, and the mean true quality of its last memories, where known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mix: str
    seed: int
    variant: str
    run: str
    shared: str
    quality: float | None


class Asked(BaseModel):
    """``study.json``: what the comparison reads beside the cells."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: dict[str, float]
    baselines: list[str]
    variants: list[str]


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant at one seed and mix; ``settings`` on top of ``root``/params.yaml are all that it is made by."""

    root: Path
    study: Path
    mix: str
    seed: int
    variant: str
    settings: tuple[str, ...]
    shared: str  # digest of all that the cells of a study have in common

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
    file = root / "params.yaml"
    asked = load_config(file, overrides).ablate
    names = list(dict.fromkeys(variants or asked.variants))
    chosen: tuple[Sequence[Any], ...] = (
        list(dict.fromkeys(seeds or asked.seeds)), list(dict.fromkeys(mixes or asked.mixes)), names
    )  # fmt: skip
    _check_names(asked, [*names, *asked.baselines], chosen[1])
    decided = {key: f"variant {name}" for name in names for key in keys_of(asked.variants[name])}
    refuse_overrides(overrides, OWN | decided)
    if quick:
        chosen = (chosen[0][:1], chosen[1][:1], names[:QUICK_VARIANTS])
    both = [*SIDE_BY_SIDE, *([f"loop.num_rounds={QUICK_ROUNDS}"] if quick else []), *overrides]
    base = load_config(file, both)
    shared = digest([result_parameters(base), base.loop.num_rounds, base.evaluation.model_dump(mode="json")])
    cells = []
    for seed in chosen[0]:
        for mix in chosen[1]:
            seeded = [f"data.mix={mix}", f"warmstart.seed={seed}", f"loop.seed={seed}"]
            for name in chosen[2]:
                policy = f"policies.{name}={json.dumps(asked.variants[name])}"
                settings = (*seeded, *both, policy)
                if seed == chosen[0][0]:  # a seed makes no setting wrong, and reading all of them takes seconds
                    load_config(file, settings, policy=name)
                cells.append(Cell(root, study_folder(root, quick), str(mix), int(seed), name, settings, shared))
    return cells


def _check_names(asked: Ablate, names: Sequence[str], mixes: Sequence[str]) -> None:
    for name in names:
        if name not in asked.variants:
            raise ConfigError(f"ablate.variants: no variant {name!r}; known: {', '.join(asked.variants)}")
        for key in keys_of(asked.variants[name]):
            if key in OWN:
                raise ConfigError(f"ablate.variants.{name}.{'.'.join(key)}: {OWN[key]} decides it")
    if not names:
        raise ConfigError("ablate.variants: there is none")
    for mix in mixes:
        if mix not in asked.targets:
            raise ConfigError(f"ablate.targets: no EM whose cost is told for mix {mix!r}")

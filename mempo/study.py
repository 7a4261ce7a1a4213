"""An ablation: which cells it has, and what they say: how soon, how well, and whether a difference is more than noise.

A *cell* is one variant, seed and mix: a folder ``ablation/<mix>/seed_<n>/<variant>/`` with the files
``FILES``. Nothing else is read but ``study.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from mempo import storage
from mempo.evaluation import EvaluationRow
from mempo.figures import training_cpu_seconds
from mempo.matrix import Asked, Cell, Made
from mempo.resampling import compare, cost_ratios, holm, interval

FILES = ("cell.json", "rounds.parquet", "evaluation.parquet", "rewards.parquet")
SMOOTHED = 3  # rounds in the running mean that decides when a target is reached


def read_cells(folder: Path) -> pd.DataFrame:
    """One row a finished cell: what its ``cell.json`` says, and the cell's ``folder``.

    Raises ``FileNotFoundError`` where there is none or one lacks a file, ``ValueError`` for a file that is no cell's.
    """
    found = []
    for path in sorted(folder.rglob("cell.json")):
        for name in FILES:
            if not (path.parent / name).exists():
                raise FileNotFoundError(f"{path.parent / name} is missing; `mempo ablate` makes the cell again")
        found.append(storage.read_as(Made, path).model_dump() | {"folder": str(path.parent)})
    if not found:
        raise FileNotFoundError(f"{folder}: no finished cell in it; `mempo ablate` makes them")
    return pd.DataFrame(found)


def is_made(cell: Cell, run: str) -> bool:
    """Whether the cell's files are whole and were made by the run folder named ``run`` under the study's settings."""
    if not all((cell.folder / name).exists() for name in FILES):
        return False
    try:
        made = storage.read_as(Made, cell.folder / "cell.json")
    except ValueError:
        return False
    return (made.run, made.shared) == (run, cell.shared)


@dataclass(frozen=True, slots=True)
class Study:
    """All cells, what was asked (``targets`` by mix, ``baselines``), and what they say: see the functions below.

    ``tables`` are by mix, p-values corrected; ``spent`` is a row a cell.
    """

    cells: pd.DataFrame
    targets: dict[str, float]
    baselines: list[str]
    curves: pd.DataFrame
    spent: pd.DataFrame
    tables: dict[str, pd.DataFrame]


def read(folder: Path) -> Study:
    """The study in ``folder``. Raises ``FileNotFoundError`` where it has no cell or no ``study.json``."""
    cells, asked = read_cells(folder), folder / "study.json"
    if not asked.exists():
        raise FileNotFoundError(f"{asked} is missing; `mempo ablate` writes it")
    told = storage.read_as(Asked, asked)
    cells = cells[cells["variant"].isin(told.variants)]  # others were asked for once, and are no longer
    for mix, of_mix in cells.groupby("mix", sort=False):
        if str(mix) not in told.targets:
            raise ValueError(f"{asked}: targets: no EM for mix {mix!r}")
        if of_mix["shared"].nunique() > 1:
            odd = of_mix[of_mix["shared"] != of_mix["shared"].mode()[0]]["folder"].tolist()
            raise ValueError(f"{odd[0]}: made under other settings than most of its mix; `mempo ablate` makes it again")
    curves = learning_curves(cells)
    spent = costs_to_target(curves, told.targets)
    found = tables(cells, spent, told.baselines)
    for measure in ("em", "rollouts"):
        found = corrected(found, measure)
    return Study(cells, told.targets, told.baselines, curves, spent, found)


def learning_curves(cells: pd.DataFrame) -> pd.DataFrame:
    """A row a round of every cell: sampled EM of its rollouts, the rollouts and CPU-seconds spent by its end."""
    curves = []
    for cell in cells.to_dict("records"):
        rounds = pd.read_parquet(Path(cell["folder"]) / "rounds.parquet")
        curves.append(
            rounds.assign(
                mix=cell["mix"],
                seed=cell["seed"],
                variant=cell["variant"],
                rollouts=rounds["trajectories"].cumsum(),
                cpu_seconds=training_cpu_seconds(rounds),
                smoothed_em=rounds["em"].rolling(SMOOTHED, min_periods=SMOOTHED).mean(),
            )
        )
    return pd.concat(curves, ignore_index=True)


def reaches(cost: Sequence[float], value: Sequence[float], target: float) -> float:
    """The cost at which ``value`` first reaches ``target``, linear between two points; infinite where it never does.

    >>> reaches([64, 128, 192], [0.2, 0.6, 0.8], 0.7)
    160.0
    """
    before: tuple[float, float] | None = None
    for spent, reached in zip(cost, value, strict=True):
        if math.isnan(reached):
            continue
        if reached >= target:
            if before is None:
                return float(spent)
            return float(before[0] + (spent - before[0]) * (target - before[1]) / (reached - before[1]))
        before = (spent, reached)
    return math.inf


def costs_to_target(curves: pd.DataFrame, targets: Mapping[str, float]) -> pd.DataFrame:
    """Rollouts and CPU-seconds until the running mean of sampled EM reaches the mix's target, a row a cell."""
    rows = []
    for (mix, seed, variant), cell in curves.groupby(["mix", "seed", "variant"], sort=False):
        cell = cell.sort_values("round")
        found = {
            name: reaches(cell[name].tolist(), cell["smoothed_em"].tolist(), targets[str(mix)])
            for name in ("rollouts", "cpu_seconds")
        }
        rows.append({"mix": mix, "seed": seed, "variant": variant, **found})
    return pd.DataFrame(rows)


def answers(cells: pd.DataFrame, *, greedy: bool) -> dict[str, pd.DataFrame]:
    """EM of one mix's cells by variant: a table [seeds, questions]. Raises ``ValueError`` on unequal questions."""
    found: dict[str, pd.DataFrame] = {}
    for variant, group in cells.groupby("variant", sort=False):
        rows = []
        for cell in group.sort_values("seed").to_dict("records"):
            asked = storage.read_records(Path(cell["folder"]) / "evaluation.parquet", EvaluationRow)
            rows.append(
                pd.Series({row.question_id: row.em for row in asked if row.greedy == greedy}, name=cell["seed"])
            )
        found[str(variant)] = pd.DataFrame(rows)
    questions = {frozenset(table.columns) for table in found.values()}
    if len(questions) > 1 or any(table.isna().any(axis=None) for table in found.values()):
        raise ValueError("cells of one mix were evaluated on different questions; evaluate them alike first")
    return found


def mean_ranks(spent: pd.DataFrame) -> pd.Series[float]:
    """By variant, its mean rank of rollouts to the target, ranked within each seed and mix; ties share their mean."""
    ranks = spent.groupby(["mix", "seed"])["rollouts"].rank(method="average")
    return ranks.groupby(spent["variant"]).mean().sort_values()


def tables(cells: pd.DataFrame, spent: pd.DataFrame, baselines: Sequence[str]) -> dict[str, pd.DataFrame]:
    """By mix, one row a variant: cost to the target, EM, memory quality, and differences to every baseline there is.

    ``rollouts`` and ``cpu_seconds`` are medians over seeds, infinite unless more than half get there; ``reached``
    counts those that do. ``em_to_<baseline>_*`` is ``compare`` of sampled EM, ``rollouts_to_<baseline>_*`` is
    ``cost_ratios``, each an ``Estimate``; p-values are not corrected yet (see ``corrected``).
    """
    found = {}
    for mix, of_mix in cells.groupby("mix", sort=False):
        sampled, greedy = answers(of_mix, greedy=False), answers(of_mix, greedy=True)
        rows = []
        for variant, group in of_mix.groupby("variant", sort=False):
            mine = spent[(spent["mix"] == mix) & (spent["variant"] == variant)]
            em, low, high = interval(sampled[str(variant)])
            rows.append(
                {
                    "variant": variant,
                    "seeds": len(group),
                    "reached": int(np.isfinite(mine["rollouts"]).sum()),
                    "rollouts": float(mine["rollouts"].median()),
                    "cpu_seconds": float(mine["cpu_seconds"].median()),
                    "em": em,
                    "em_low": low,
                    "em_high": high,
                    "em_greedy": float(greedy[str(variant)].to_numpy().mean()),
                    "quality": float(group["quality"].astype(float).mean()),
                }
            )
        table = pd.DataFrame(rows).set_index("variant")
        for baseline in (name for name in baselines if name in sampled):
            ratios = cost_ratios(spent[spent["mix"] == mix], baseline, "rollouts")
            for name, estimates in (("em", compare(sampled, baseline)), ("rollouts", ratios)):
                for variant, found_here in estimates.items():
                    for part, value in asdict(found_here).items():
                        table.loc[variant, f"{name}_to_{baseline}_{part}"] = value
        found[str(mix)] = table
    return found


def corrected(tables: Mapping[str, pd.DataFrame], measure: str) -> dict[str, pd.DataFrame]:
    """``tables`` with Holm's rule over all p-values of ``em`` or ``rollouts``: every mix, variant and baseline."""
    marked = [
        (mix, variant, column)
        for mix, table in tables.items()
        for column in table.columns
        if column.startswith(f"{measure}_to_") and column.endswith("_p_value")
        for variant in table.index[table[column].notna()]
    ]
    found = {mix: table.copy() for mix, table in tables.items()}
    for (mix, variant, column), p in zip(marked, holm([float(tables[m].loc[v, c]) for m, v, c in marked]), strict=True):
        found[mix].loc[variant, column] = p
    return found

"""An ablation: which cells it has, and what they say: how soon, how well, and whether a difference is more than noise.

A *cell* is one variant, seed and mix: a folder ``ablation/<mix>/seed_<n>/<variant>/`` with ``cell.json``,
``rounds.parquet`` and ``evaluation.parquet``. Nothing else is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mempo import storage
from mempo.figures import training_cpu_seconds
from mempo.resampling import Estimate, estimate, holm, resampled_means, resampled_medians

SMOOTHED = 3  # rounds in the running mean that decides when a target is reached


def read_cells(folder: Path) -> pd.DataFrame:
    """One row a finished cell: what its ``cell.json`` says, and the cell's ``folder``."""
    found = [storage.read_json(path) | {"folder": str(path.parent)} for path in sorted(folder.rglob("cell.json"))]
    if not found:
        raise FileNotFoundError(f"{folder}: no finished cell in it; `mempo ablate` makes them")
    return pd.DataFrame(found)


def read_study(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The cells, and ``study.json``: ``targets`` by mix and ``baselines``. Raises ``FileNotFoundError``."""
    cells, asked = read_cells(folder), folder / "study.json"
    if not asked.exists():
        raise FileNotFoundError(f"{asked} is missing; `mempo ablate` writes it")
    return cells, storage.read_json(asked)


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
            asked = pd.read_parquet(Path(cell["folder"]) / "evaluation.parquet")
            rows.append(asked[asked["greedy"] == greedy].set_index("question_id")["em"].rename(cell["seed"]))
        found[str(variant)] = pd.DataFrame(rows)
    questions = {frozenset(table.columns) for table in found.values()}
    if len(questions) > 1 or any(table.isna().any(axis=None) for table in found.values()):
        raise ValueError("cells of one mix were evaluated on different questions; evaluate them alike first")
    return found


def compare(
    tables: Mapping[str, pd.DataFrame], baseline: str, *, num_samples: int = 10_000, seed: int = 0
) -> dict[str, Estimate]:
    """Every variant's EM minus ``baseline``'s: paired bootstrap, seeds and questions both drawn anew (crossed).

    Only seeds that both have count.
    """
    found = {}
    for variant, table in tables.items():
        seeds = table.index.intersection(tables[baseline].index)
        if variant != baseline and len(seeds):
            gaps = (table.loc[seeds] - tables[baseline].loc[seeds, table.columns]).to_numpy(dtype=float)
            found[variant] = estimate(float(gaps.mean()), resampled_means(gaps, num_samples, seed), 0.0, len(seeds))
    return found


def cost_ratios(
    spent: pd.DataFrame, baseline: str, measure: str, *, num_samples: int = 10_000, seed: int = 0
) -> dict[str, Estimate]:
    """Median over seeds of one mix's cost to the target, divided by that of ``baseline`` at the same seed.

    One side never there: 0 or infinity. Neither: the seed is left out; no seed left: the variant is.
    """
    costs = spent.pivot(index="seed", columns="variant", values=measure)
    found = {}
    for variant in costs.columns.drop(baseline):
        mine, theirs = costs[variant].to_numpy(), costs[baseline].to_numpy()
        told = np.isfinite(mine) | np.isfinite(theirs)
        if told.any():
            ratios = mine[told] / theirs[told]
            draws = resampled_medians(ratios, num_samples, seed)
            found[str(variant)] = estimate(
                float(np.quantile(ratios, 0.5, method="inverted_cdf")), draws, 1.0, len(ratios)
            )
    return found


def mean_ranks(spent: pd.DataFrame) -> pd.Series[float]:
    """By variant, its mean rank of rollouts to the target, ranked within each seed and mix; ties share their mean."""
    ranks = spent.groupby(["mix", "seed"])["rollouts"].rank(method="average")
    return ranks.groupby(spent["variant"]).mean().sort_values()


def interval(table: pd.DataFrame, *, num_samples: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
    """Mean EM of one variant and its 95 % interval over seeds and questions."""
    values = table.to_numpy(dtype=float)
    low, high = np.quantile(resampled_means(values, num_samples, seed), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def tables(cells: pd.DataFrame, targets: Mapping[str, float], baselines: Sequence[str]) -> dict[str, pd.DataFrame]:
    """By mix, one row a variant: cost to the target, EM, memory quality, and differences to every baseline there is.

    ``rollouts`` and ``cpu_seconds`` are medians over seeds, infinite where fewer than half get there; ``reached``
    counts those that do. ``em_to_<baseline>_*`` is ``compare`` of sampled EM, ``rollouts_to_<baseline>_*`` is
    ``cost_ratios``, each an ``Estimate``; p-values are not corrected yet (see ``corrected``).
    """
    spent = costs_to_target(learning_curves(cells), targets)
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

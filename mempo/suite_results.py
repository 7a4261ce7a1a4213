"""What came of a suite: figures by agent, dataset and number of objectives, differences between agents, one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from mempo import storage
from mempo.records import Status
from mempo.resampling import Estimate, estimate, resampled_means

ALL = "all"
MEASURES = ("em", "em_mean", "f1", "format", "turns", "total_tokens", "peak_tokens", "dependency")
COMPARED = ("em", "em_mean", "f1")


@dataclass(frozen=True, slots=True)
class Comparison:
    """``first`` minus ``second`` in ``measure``, question by question, and the ratio of their mean ``total_tokens``."""

    dataset: str
    attempts: str
    first: str
    second: str
    measure: str
    num_questions: int
    difference: Estimate
    token_ratio: float


@dataclass(frozen=True)
class Results:
    """``rows``: ``EvaluationRow`` with ``dataset`` and ``attempts`` (sampled or greedy); ``policy`` names the agent.

    ``seconds``: (agent, dataset) -> of answering, loading apart. ``majority``: dataset -> the EM of a majority guesser
    by number of objectives as text. ``agents`` in their order; the others are compared with the first.
    """

    name: str
    agents: list[str]
    rows: pd.DataFrame
    seconds: Mapping[tuple[str, str], float]
    majority: Mapping[str, Mapping[str, float]]

    @cached_property
    def figures(self) -> pd.DataFrame:
        return table(self)

    @cached_property
    def comparisons(self) -> list[Comparison]:
        return comparisons(self)

    @property
    def datasets(self) -> list[str]:
        return list(self.figures["dataset"].unique())


def table(results: Results) -> pd.DataFrame:
    """A row for each dataset, agent, kind of attempts and number of objectives, ``all`` of them first.

    Means over attempts of the ``MEASURES``, ``em`` with its 95 % interval (questions drawn anew), shares of ``status``,
    ``seconds`` an attempt. An attempt whose search tool failed counts in ``status/tool_failed`` alone.
    """
    found = []
    for dataset, agent, attempts, number, asked in _groups(results):
        answered = counted(asked)
        low, high = _interval(by_question(answered, "em"))
        row: dict[str, Any] = {"dataset": dataset, "agent": agent, "attempts": attempts, "objectives": number,
                               "questions": int(asked["question_id"].nunique())}  # fmt: skip
        row |= {name: float(answered[name].mean()) for name in MEASURES} | {"em_low": low, "em_high": high}
        row |= {f"status/{name}": float((asked["status"] == name).mean()) for name in get_args(Status)}
        if number == ALL:
            of_cell = results.rows[(results.rows["dataset"] == dataset) & (results.rows["policy"] == agent)]
            row["seconds"] = results.seconds[agent, dataset] / len(of_cell)
        found.append(row)
    return pd.DataFrame(found)


def _groups(results: Results) -> Iterator[tuple[str, str, str, str, pd.DataFrame]]:
    for dataset, of_dataset in results.rows.groupby("dataset", sort=False):
        for agent in results.agents:
            for attempts in ("sampled", "greedy"):
                chosen = (of_dataset["policy"] == agent) & (of_dataset["attempts"] == attempts)
                if not (asked := of_dataset[chosen]).empty:
                    yield str(dataset), agent, attempts, ALL, asked
                    for number, some in asked.groupby("num_objectives"):
                        yield str(dataset), agent, attempts, str(number), some


def counted(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["status"] != "tool_failed"]


def by_question(rows: pd.DataFrame, measure: str) -> pd.Series[float]:
    """The mean over a question's attempts, by ``question_id``."""
    return rows.groupby("question_id")[measure].mean().astype(float)


def _interval(values: pd.Series[float]) -> tuple[float, float]:
    if values.empty:
        return float("nan"), float("nan")
    low, high = np.quantile(resampled_means(values.to_numpy()[None], 10_000, 0), [0.025, 0.975])
    return float(low), float(high)


def comparisons(results: Results) -> list[Comparison]:
    """Every other agent with the first: paired bootstrap over the questions that both answered."""
    found: list[Comparison] = []
    for dataset, of_dataset in counted(results.rows).groupby("dataset", sort=False):
        for attempts, rows in of_dataset.groupby("attempts", sort=False):
            base = rows[rows["policy"] == results.agents[0]]
            for agent in results.agents[1:]:
                pair = (rows[rows["policy"] == agent], base)
                found += _compare(str(dataset), str(attempts), (agent, results.agents[0]), pair)
    return found


def _compare(
    dataset: str, attempts: str, names: tuple[str, str], rows: tuple[pd.DataFrame, pd.DataFrame]
) -> Iterator[Comparison]:
    tokens = [by_question(some, "total_tokens") for some in rows]
    both = tokens[0].index.intersection(tokens[1].index)
    if both.empty:
        return
    ratio = float(tokens[0][both].mean() / tokens[1][both].mean())
    single = (rows[1]["num_objectives"] == 1).all()
    for measure in COMPARED:
        if single and measure == "em_mean":
            continue  # the same as em
        first, second = (by_question(some, measure)[both] for some in rows)
        gaps = (first - second).to_numpy()
        told = estimate(float(gaps.mean()), resampled_means(gaps[None], 10_000, 0), 0.0, len(both))
        yield Comparison(dataset, attempts, *names, measure, len(both), told, ratio)


def write(results: Results, folder: Path) -> None:
    """``rows.parquet``, ``summary.parquet`` and ``summary.json`` under ``folder``."""
    with storage.whole_file(folder / "rows.parquet") as path:
        results.rows.to_parquet(path)
    with storage.whole_file(folder / "summary.parquet") as path:
        results.figures.to_parquet(path)
    storage.write_json(
        folder / "summary.json",
        {
            "suite": results.name,
            "figures": [_finite(row) for row in results.figures.to_dict("records")],
            "comparisons": [
                asdict(one) | {"difference": _finite(asdict(one.difference))} for one in results.comparisons
            ],
            "majority": results.majority,
        },
    )


def _finite(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Without what is not known: JSON has no NaN."""
    return {str(name): value for name, value in row.items() if value == value}


def numbers(figures: pd.DataFrame) -> Sequence[int]:
    """The numbers of objectives that ``figures`` are of."""
    return sorted({int(number) for number in figures["objectives"] if number != ALL})

"""A finished run under another reward: recomputed from its stored log-probabilities, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import pandas as pd

from mempo import samples, stats, storage
from mempo.config import Config
from mempo.data import Truth
from mempo.params import ConfigError
from mempo.quality import Chain, memory_quality
from mempo.records import Question, Trajectory, TurnScore
from mempo.rounds import by_question

_COLUMNS = [field.name for field in fields(samples.TurnReward)]  # a round may have no turn at all
# What the stored probes depend on: another value needs another forward pass.
PROBED = ("prompt", "format", "rollout", "scoring", "model", "data")


def refuse_other_passes(made: Config, asked: Config) -> None:
    """Raise ``ConfigError`` naming a setting that the stored log-probabilities do not answer."""
    for section in PROBED:
        before, after = getattr(made, section).model_dump(), getattr(asked, section).model_dump()
        for key, value in after.items():
            if value != before[key]:
                raise ConfigError(
                    f"{section}.{key}: {value!r} needs other forward passes than the run's {before[key]!r}"
                )


def rescore(run_folder: Path, config: Config, truth: Mapping[str, list[Chain]]) -> pd.DataFrame:
    """The reward table of every finished round under ``config``, with each memory's true quality where it is known."""
    tables = []
    for folder in sorted(run_folder.glob("round_*")):
        if not (folder / "advantage.json").exists():
            continue
        trajectories = storage.read_records(folder / "rollouts.parquet", Trajectory)
        questions = by_question(storage.read_records(folder / "questions.parquet", Question))
        scores = storage.read_records(folder / "scores.parquet", TurnScore)
        index = int(folder.name.removeprefix("round_"))
        _, table = samples.build(trajectories, questions, scores, config, round_index=index)
        found = pd.DataFrame([asdict(row) for row in table], columns=_COLUMNS).assign(round=index)
        tables.append(
            found.merge(_qualities(trajectories, truth), on=["question_id", "sample_index", "turn"], how="left")
        )
    if not tables:
        raise FileNotFoundError(f"{run_folder}: no finished round in it")
    return pd.concat(tables, ignore_index=True)


def summary(table: pd.DataFrame) -> dict[str, float]:
    """Distribution of mem_reward, how much of the answer it read, and whether its advantage follows true quality.

    ``correlation`` is Pearson's, of the normalised memory advantage with quality over all scored turns that have one;
    ``complete`` and ``incomplete`` are mean advantages of memories that hold all they should, and of the others.
    """
    scored = table[table["mem_reward"].notna()]
    known = scored[scored["quality"].notna()]
    complete = known["quality"] == 1.0
    figures = {f"mem_reward/{key}": value for key, value in stats.summary(scored["mem_reward"].tolist()).items()}
    return figures | {
        "nothing kept": float((scored["kept_mem"] == 0).mean()),
        "correlation": float(known["mem_advantage"].corr(known["quality"])),
        "complete": float(known.loc[complete, "mem_advantage"].mean()),
        "incomplete": float(known.loc[~complete, "mem_advantage"].mean()),
    }


def read_truth(file: Path) -> dict[str, list[Chain]]:
    """Question id -> the facts of each objective, from a dataset's ``truth.parquet``; empty where it has none."""
    chains: dict[str, list[Chain]] = {}
    if file.exists():
        for truth in storage.read_records(file, Truth):
            chains.setdefault(truth.question_id, []).append(list(zip(truth.entities, truth.values, strict=True)))
    return chains


def _qualities(trajectories: Sequence[Trajectory], truth: Mapping[str, list[Chain]]) -> pd.DataFrame:
    rows = []
    for trajectory in trajectories:
        observations: list[str] = []
        for index, turn in enumerate(trajectory.turns):
            chains = truth.get(trajectory.question_id, [])
            quality = memory_quality(turn.memory, chains, observations) if turn.memory is not None else None
            rows.append((trajectory.question_id, trajectory.sample_index, index + 1, quality))
            observations += [turn.observation] if turn.observation else []
    return pd.DataFrame(rows, columns=["question_id", "sample_index", "turn", "quality"]).astype({"quality": float})

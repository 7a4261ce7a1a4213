"""What DVC keeps of a run, read into tables, and the figures that people compare: differences, best rounds, costs.

Nothing but DVC outputs is read, so a clone that pulled them finds the same figures without a run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from mempo import figures, rounds, storage
from mempo.config import UNTRAINED
from mempo.excerpts import Excerpt, choose
from mempo.records import Question, Trajectory
from mempo.style import ordered
from mempo.workspace import Workspace

START = "warmstart"
# Columns whose last and best round are told, under these names: the higher the better.
BEST = {"em": "em", "dev/em_greedy": "dev_em_greedy", "format_rate": "format_rate",
        "mem_reward/p50": "mem_reward_p50", "p_mem/p50": "p_mem_p50"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Results:
    """``rounds``, ``rewards`` and ``diagnoses`` (``diagnoses.summary``) by trained policy.

    ``majority`` is EM by number of objectives, and of ``all``.
    """

    metrics: Mapping[str, Mapping[str, float]]
    evaluation: pd.DataFrame
    majority: Mapping[str, float]
    rounds: Mapping[str, pd.DataFrame]
    rewards: Mapping[str, pd.DataFrame]
    diagnoses: Mapping[str, Any]
    excerpts: list[Excerpt]

    @property
    def with_memory(self) -> list[str]:
        """The policies that were trained with a memory reward."""
        return _with_memory(self.rewards)


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean and standard error of the sampled EM of ``first`` minus that of ``second``, question by question."""

    first: str
    second: str
    mean: float
    error: float

    @property
    def is_noise(self) -> bool:
        return abs(self.mean) < 2 * self.error


def read(root: Path) -> Results:
    """Everything under ``root``. Policies are those that were evaluated; all but ``UNTRAINED`` have rounds.

    Raises ``FileNotFoundError`` naming the missing file and the command that makes it.
    """
    folder, evaluate = root / "results", "mempo evaluate"
    evaluation = pd.read_parquet(there(folder / "evaluation.parquet", evaluate))
    majority = storage.read_json(there(folder / "majority.json", evaluate))
    metrics = storage.read_json(there(Workspace(root).metrics / "evaluation.json", evaluate))
    counts = evaluation.drop_duplicates("question_id")["num_objectives"]
    everything = sum(majority[str(count)] for count in counts) / len(counts)
    names = [name for name in ordered(evaluation["policy"]) if name not in UNTRAINED]
    by_round, rewards = (
        {name: pd.read_parquet(there(folder / name / f"{kind}.parquet", f"mempo train {name}")) for name in names}
        for kind in ("rounds", "rewards")
    )
    diagnosed = {
        name: storage.read_json(there(folder / name / "diagnoses.json", f"mempo train {name}")) for name in names
    }
    shown = [*_with_memory(rewards), *names][:1]
    found = [excerpt for name in shown for excerpt in _excerpts(folder, name, rewards[name])]
    return Results(metrics, evaluation, majority | {"all": everything}, by_round, rewards, diagnosed, found)


def train_figures(frame: pd.DataFrame) -> dict[str, Any]:
    """One policy's entry of metrics/train.json, from its table of rounds. A figure that was never measured is left out.

    ``cpu_seconds`` are of training alone, ``seconds`` by step on the clock; ``orchestration_share`` =
    1 - sum(work_s) / sum(wall_s) over the rounds that no kill cut in two.
    """
    steps = [step for step in figures.PHASES if f"time/{step}_s" in frame]
    found: dict[str, Any] = {
        "rounds": len(frame),
        "trajectories": int(frame["trajectories"].sum()),
        "cpu_seconds": float(figures.training_cpu_seconds(frame).iloc[-1]),
        "seconds": {step: float(frame[f"time/{step}_s"].sum()) for step in steps},
        "tokens_per_second": rates(frame),
    }
    for column, name in BEST.items():
        measured = frame.reindex(columns=["round", column]).dropna()
        if len(measured):
            best = int(measured[column].argmax())
            found[f"{name}_last"] = float(measured[column].iloc[-1])
            found[f"{name}_best"] = float(measured[column].iloc[best])
            found[f"{name}_best_round"] = int(measured["round"].iloc[best])
    timed = frame.reindex(columns=["wall_s", "work_s"]).dropna()
    if len(timed):
        found["orchestration_share"] = float(1 - timed["work_s"].sum() / timed["wall_s"].sum())
    return found


def rates(frame: pd.DataFrame) -> dict[str, float]:
    """Tokens a second over all rounds, loading included: generated ones of ``rollout``; of ``score`` and ``update``
    those of all turns, prompt and response (scoring reads shared prefixes once, so its own count is lower).
    """
    generated = float(frame["response_tokens"].sum())
    held = generated + float(frame["prompt_tokens"].sum())
    counts = {"rollout": generated, "score": held, "update": held}
    return {step: count / float(frame[f"time/{step}_s"].sum()) for step, count in counts.items()}


def controlled(frame: pd.DataFrame) -> dict[int, dict[str, float]]:
    """The figures of known good and bad memories, of the first and of the last round that has them."""
    names = [name for name in frame.columns if name.startswith("control/")]
    measured = frame[frame["control/own/n"] > 0] if names else frame[:0]
    return {
        int(row["round"]): {n.removeprefix("control/"): float(row[n]) for n in names if pd.notna(row[n])}
        for _, row in pd.concat([measured.head(1), measured.tail(1)]).iterrows()
    }


def differences(rows: pd.DataFrame) -> list[Difference]:
    """Every two policies, an untrained one always second. Paired: what makes a question hard for both drops out."""
    sampled = rows[~rows["greedy"]].pivot(index="question_id", columns="policy", values="em")
    pairs = [(b, a) if a in UNTRAINED else (a, b) for a, b in combinations(ordered(rows["policy"]), 2)]
    gaps = [(first, second, sampled[first] - sampled[second]) for first, second in pairs]
    return [Difference(a, b, float(gap.mean()), figures.standard_error(gap)) for a, b, gap in gaps]


def _with_memory(rewards: Mapping[str, pd.DataFrame]) -> list[str]:
    return [name for name, rows in rewards.items() if rows["mem_reward"].notna().any()]


def _excerpts(folder: Path, name: str, rewards: pd.DataFrame) -> list[Excerpt]:
    """Trajectories of the last round of ``name``."""
    last, command = int(rewards["round"].max()), f"mempo train {name}"
    kept = folder / name / "trajectories"
    trajectories = storage.read_records(there(kept / f"rollouts_{last:04d}.parquet", command), Trajectory)
    questions = storage.read_records(there(kept / f"questions_{last:04d}.parquet", command), Question)
    return choose(trajectories, rounds.by_question(questions), rewards[rewards["round"] == last])


def there(path: Path, command: str) -> Path:
    """``path``. Raises ``FileNotFoundError`` naming it and the command that makes it."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; `{command}` makes it")
    return path

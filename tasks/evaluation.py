"""Evaluation of policies on held-out questions, resumable: answers are kept under a key of all they depend on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
from prefect import task

from mempo import evaluation, rounds, storage
from mempo.config import SCHEMA, Config, digest
from mempo.console import progress
from mempo.evaluation import EvaluationRow
from mempo.records import Question
from mempo.rollout import collect
from mempo.search import open_searcher
from mempo.workspace import Workspace, result_parameters
from tasks import engines


@dataclass(frozen=True, slots=True)
class Attempts:
    """How each question is asked: ``samples`` times at ``temperature``, and once greedily."""

    samples: int = 1
    greedy: bool = True
    temperature: float = 1.0
    seed: int = 0


@task(task_run_name="evaluate {name}", persist_result=False)
def evaluate_policy(workspace: Workspace, name: str, policy: Path, config: Config) -> list[EvaluationRow]:
    """The first ``evaluation.num_questions`` questions of the split, once sampled and once greedy."""
    asked, data = config.evaluation, workspace.data
    attempts = Attempts(temperature=asked.temperature, seed=asked.seed)
    inputs = {"data": storage.content_hash(data), "asked": asked.model_dump(mode="json")}
    found = workspace.root / "runs" / "evaluation" / f"{name}-{answers_key(policy, config, attempts, inputs)}.parquet"
    if not found.exists():
        questions = storage.read_records(data / f"{asked.split}.parquet", Question)[: asked.num_questions]
        if len(questions) < asked.num_questions:
            raise ValueError(
                f"evaluation.num_questions: {asked.split} has {len(questions)}, asked {asked.num_questions}"
            )
        storage.write_records(found, answers(name, policy, config, data, questions, attempts))
    return storage.read_records(found, EvaluationRow)


def answers_key(policy: Path, config: Config, attempts: Attempts, inputs: dict[str, Any]) -> str:
    """Hash of all that ``answers`` depend on; ``inputs`` tells the data."""
    weights = storage.content_hash(policy) if policy.exists() else str(policy)  # else the id of a hub
    columns = [field.name for field in fields(EvaluationRow)]
    return digest([SCHEMA, columns, result_parameters(config), asdict(attempts), inputs | {"policy": weights}])


def answers(
    name: str, policy: Path, config: Config, data: Path, questions: Sequence[Question], attempts: Attempts
) -> list[EvaluationRow]:
    """``policy`` asked ``questions``, searching the corpus of folder ``data``; ``name`` is its name in the rows."""
    sampling = config.rollout.model_copy(update={"temperature": attempts.temperature})
    config = config.model_copy(update={"rollout": sampling})
    engine = engines.engine_of(policy, config.runtime)
    searcher = open_searcher(data / "corpus.jsonl", config.search)
    rows: list[EvaluationRow] = []
    for greedy, samples in ((False, attempts.samples), (True, int(attempts.greedy))):
        if not samples:
            continue
        with progress(f"{name} {'greedy' if greedy else 'sampled'}", samples * len(questions)) as advance:
            trajectories = asyncio.run(
                collect(
                    engine, searcher, questions, config,
                    round_index=0, seed=attempts.seed, greedy=greedy, samples=samples, progress=advance,
                )
            )  # fmt: skip
        rows += evaluation.rows(name, trajectories, rounds.by_question(questions), config, greedy=greedy)
    engines.sleep()
    return rows


@task(persist_result=False)
def write_evaluation(workspace: Workspace, rows: list[EvaluationRow], split: str) -> dict[str, dict[str, float]]:
    """``results/evaluation.parquet``, ``metrics/evaluation.json``, and what a majority guesser scores on ``split``."""
    metrics = {}
    for name in dict.fromkeys(row.policy for row in rows):
        metrics[name] = evaluation.summary([row for row in rows if row.policy == name])
    storage.write_json(workspace.metrics / "evaluation.json", metrics)
    with storage.whole_file(workspace.results("evaluation.parquet")) as path:
        pd.DataFrame([asdict(row) for row in rows]).to_parquet(path)
    guesser = storage.read_json(workspace.data / "stats.json")["splits"][split]["majority_em"]
    storage.write_json(workspace.results("majority.json"), guesser)
    return metrics

"""Evaluation of policies on held-out questions, resumable policy by policy."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

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


@task(task_run_name="evaluate {name}", persist_result=False)
def evaluate_policy(workspace: Workspace, name: str, policy: Path, config: Config) -> list[EvaluationRow]:
    """The first ``evaluation.num_questions`` questions of the split, once sampled and once greedy."""
    asked = config.evaluation
    weights = storage.content_hash(policy) if policy.exists() else str(policy)  # else the id of a hub
    inputs = {"policy": weights, "data": storage.content_hash(workspace.data)}
    key = digest([SCHEMA, result_parameters(config), asked.model_dump(mode="json"), inputs])
    found = workspace.root / "runs" / "evaluation" / f"{name}-{key}.parquet"
    if found.exists():
        return storage.read_records(found, EvaluationRow)
    questions = storage.read_records(workspace.data / f"{asked.split}.parquet", Question)[: asked.num_questions]
    if len(questions) < asked.num_questions:
        raise ValueError(f"evaluation.num_questions: {asked.split} has {len(questions)}, asked {asked.num_questions}")
    sampling = config.rollout.model_copy(update={"temperature": asked.temperature})
    config = config.model_copy(update={"rollout": sampling})
    engine = engines.engine_of(policy, config.runtime)
    searcher = open_searcher(workspace.data / "corpus.jsonl", config.search)
    rows: list[EvaluationRow] = []
    for greedy in (False, True):
        with progress(f"{name} {'greedy' if greedy else 'sampled'}", len(questions)) as advance:
            trajectories = asyncio.run(
                collect(
                    engine, searcher, questions, config,
                    round_index=0, seed=asked.seed, greedy=greedy, samples=1, progress=advance,
                )
            )  # fmt: skip
        rows += evaluation.rows(name, trajectories, rounds.by_question(questions), config, greedy=greedy)
    engines.sleep()
    storage.write_records(found, rows)
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

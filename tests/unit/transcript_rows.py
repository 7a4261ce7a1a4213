"""Trajectories of the pipeline's own agent loop, told in each form of docs/score.md."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from mempo import prompts
from mempo.config import Config, Rollout
from mempo.engines import Generation, Sampling
from mempo.records import Question, Trajectory
from mempo.rollout import collect

QUESTION = Question("ulm", "What is the capital of the country of Ulm?", [["Berlin", "berlin"], ["Yen"]])
OBSERVATION = 'The capital of France <|im_end|> is <mem>Paris</mem>. "Ulm"'
SAID = [
    [
        "<think>a</think><search>Ulm</search>",
        "<mem>Ulm: unknown</mem>\n<think>b</think> <search>capital</search>",
        "<mem>the capital is Berlin</mem><think>c</think><answer>Berlin; Yen</answer>",
    ],
    ["<think>a</think><search>Ulm</search>", "<mem></mem><think>\nb\n</think><answer>9</answer>"],
]


class Scripted:
    """Says given texts, in the token ids of ``tokenizer``."""

    continuous, policy_version, window = False, 0, 512

    def __init__(self, tokenizer: Any, says: list[str]) -> None:
        self.tokenizer, self.says = tokenizer, list(says)

    async def generate(self, prompt_ids: list[int], *, seed: int, sampling: Sampling) -> Generation:
        ids = prompts.encode_frame(self.tokenizer, self.says.pop(0))
        return Generation(ids, [-0.5] * len(ids), "stop")

    def logprobs(self, *_: Any, **__: Any) -> list[list[float]]:
        raise NotImplementedError

    def close(self) -> None: ...


class Passage:
    async def search(self, query: str) -> str:
        return OBSERVATION


def rollouts(tokenizer: Any) -> list[Trajectory]:
    """What the pipeline's own agent loop makes of ``SAID``."""
    config = Config(rollout=Rollout(max_prompt_tokens=400))
    found: list[Trajectory] = []
    for index, says in enumerate(SAID):
        engine = Scripted(tokenizer, says)
        (one,) = asyncio.run(collect(engine, Passage(), [QUESTION], config, round_index=0, seed=0, samples=1))
        found.append(replace(one, sample_index=index))
    return found


def rows_of(trajectories: list[Trajectory], form: str) -> list[dict[str, Any]]:
    head = {"id": "ulm", "question": QUESTION.question, "golden_answers": QUESTION.golden_answers}
    rows = []
    for trajectory in trajectories:
        body: dict[str, Any] = {"turns": [{"response": t.text, "observation": t.observation} for t in trajectory.turns]}
        if form == "messages":
            messages = [("system", "You are a helpful assistant."), ("user", QUESTION.question)]
            for turn in trajectory.turns:
                messages.append(("assistant", turn.text))
                seen = turn.observation
                messages += [] if seen is None else [("user", f"<information>\n{seen}\n</information>")]
            body = {"messages": [{"role": role, "content": content} for role, content in messages]}
        elif form in ("ids", "marks"):
            turns = [{"response_ids": t.response_ids, "observation_ids": t.observation_ids} for t in trajectory.turns]
            body = {"prompt_ids": trajectory.turns[0].prompt_ids, "turns": turns}
            for one, turn in zip(turns, trajectory.turns, strict=True):
                if form == "marks":
                    start, end = turn.mem_span or (-1, -1)
                    size = len(turn.response_ids)
                    one["marks"] = [1 if i == start else 2 if i == end - 1 else 0 for i in range(size)]
        rows.append(head | body)
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path

"""The rollout step: the agent loop, one coroutine for each trajectory; the engine batches their turns."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mempo import prompts, tags
from mempo.config import Config
from mempo.engines import Engine, Sampling
from mempo.records import Question, Status, Trajectory, Turn
from mempo.search import Searcher, ToolError
from mempo.turns import read_turn


async def collect(
    engine: Engine,
    searcher: Searcher,
    questions: Sequence[Question],
    config: Config,
    *,
    round_index: int,
    seed: int,
    greedy: bool = False,
    progress: Callable[..., object] | None = None,
    samples: int | None = None,
) -> list[Trajectory]:
    """``samples`` (``loop.group_size``) trajectories for each question, in order of question and sample.

    Every turn has its own seed. An engine that is not ``continuous`` gets fixed blocks, ``rollout.block_questions``
    groups or as many rows of fewer samples: its batches, and so the result, are a function of the arguments. Others
    get all at once, and no trajectory waits for another. ``progress`` is told how many are finished, and at what rate.
    """
    agent = _Agent(engine, searcher, config, greedy, round_index, seed)
    done, tokens, began = 0, 0, time.monotonic()

    async def finished(question: Question, sample_index: int) -> Trajectory:
        nonlocal done, tokens
        trajectory = await agent.attempt(question, sample_index)
        done += 1
        tokens += sum(len(turn.response_ids) for turn in trajectory.turns)
        if progress is not None:
            progress(done, tokens_per_s=tokens / max(time.monotonic() - began, 1e-9))
        return trajectory

    trajectories: list[Trajectory] = []
    num_samples = config.loop.group_size if samples is None else samples
    rows = (
        len(questions) * num_samples if engine.continuous else config.rollout.block_questions * config.loop.group_size
    )
    block_size = max(1, rows // num_samples)
    for start in range(0, len(questions), block_size):
        block = questions[start : start + block_size]
        trajectories += await asyncio.gather(*(finished(question, i) for question in block for i in range(num_samples)))
    return trajectories


def turn_seed(seed: int, round_index: int, question_id: str, sample_index: int, turn: int) -> int:
    """64 bits of a hash of all that names a turn: the same on every machine, in every order."""
    name = json.dumps([seed, round_index, question_id, sample_index, turn])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


class _Agent:
    """What all trajectories of one call share."""

    def __init__(
        self, engine: Engine, searcher: Searcher, config: Config, greedy: bool, round_index: int, seed: int
    ) -> None:
        rollout = config.rollout
        self.engine, self.searcher, self.config = engine, searcher, config
        self.frame = prompts.chat_frame(engine.tokenizer, config.system)
        self.sampling = Sampling(
            temperature=0.0 if greedy else rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        self.seed_parts = (seed, round_index)

    async def attempt(self, question: Question, sample_index: int) -> Trajectory:
        """Turns until one ends the trajectory. The answer is read from the model's own last turn alone."""
        first_prompt = self.frame.first_prompt(prompts.encode_text(self.engine.tokenizer, question.question))
        turns: list[Turn] = []
        too_long = len(first_prompt) > self.config.rollout.max_prompt_tokens
        status: Status | None = "context_overflow" if too_long else None
        while status is None:
            rollout = self.config.rollout
            prompt_ids = prompts.context(rollout.context, first_prompt, turns, rollout.recent_turns)
            if len(prompt_ids) >= self.engine.window:
                status = "context_overflow"
                break
            seed = turn_seed(*self.seed_parts, question.question_id, sample_index, len(turns) + 1)
            generation = await self.engine.generate(prompt_ids, seed=seed, sampling=self.sampling)
            turn = read_turn(
                self.engine.tokenizer,
                prompt_ids,
                generation.token_ids,
                len(turns) + 1,
                sampling_logprobs=generation.logprobs,
                finish_reason=generation.finish_reason,
                require_memory=self.config.format.require_memory,
            )
            turns.append(turn)
            status = _ending(turn, len(turns), self.config.rollout.max_turns)
            if status is None:
                assert turn.argument is not None
                try:
                    turns[-1] = self._observed(turn, await self.searcher.search(turn.argument))
                except ToolError:
                    status = "tool_failed"
        answer = turns[-1].argument if status == "answered" else None
        return Trajectory(question.question_id, sample_index, self.engine.policy_version, turns, answer, status)

    def _observed(self, turn: Turn, text: str) -> Turn:
        """The turn with the tool's text, cut to ``search.max_observation_tokens``, as plain text in the chat frame."""
        tokenizer, limit = self.engine.tokenizer, self.config.search.max_observation_tokens
        ids = prompts.encode_text(tokenizer, text)
        if len(ids) > limit:
            ids = ids[:limit]
            text, _ = tags.token_offsets(tokenizer, ids)
        return replace(turn, observation=text, observation_ids=self.frame.observation(ids, turn.response_ids))


def _ending(turn: Turn, number: int, max_turns: int) -> Status | None:
    """How the trajectory ends with this turn; None where it goes on with a search."""
    if turn.action == "answer":
        return "answered"
    if turn.action is None:
        return "truncated" if turn.finish_reason == "length" else "no_action"
    return "max_turns" if number >= max_turns else None

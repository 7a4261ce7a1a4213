"""Small records for tests, with only what a test cares about spelled out."""

from __future__ import annotations

from typing import Any

from mempo.records import ProbeScore, Question, Trajectory, Turn, TurnScore


def question(question_id: str = "q", golds: list[list[str]] | None = None) -> Question:
    return Question(question_id, f"Question {question_id}?", golds or [["Paris"]], "test")


def turn(prompt: int, response: int, span: tuple[int, int] | None = None, **fields: Any) -> Turn:
    """A valid search turn of ``prompt`` + ``response`` tokens, numbered so that no two are alike."""
    values: dict[str, Any] = {
        "prompt_ids": list(range(prompt)),
        "response_ids": list(range(100, 100 + response)),
        "sampling_logprobs": [-0.5] * response,
        "text": "",
        "valid": True,
        "memory": "m" if span else None,
        "mem_span": span,
        "action": "search",
        "argument": "x",
        "observation": "o",
        "observation_ids": [7, 8],
        "finish_reason": "stop",
    }
    return Turn(**(values | fields))


def trajectory(turns: list[Turn], question_id: str = "q", sample: int = 0, **fields: Any) -> Trajectory:
    values: dict[str, Any] = {"policy_version": 0, "answer": "Paris", "status": "answered"}
    return Trajectory(question_id=question_id, sample_index=sample, turns=turns, **(values | fields))


def probe_score(full: list[float], mem: list[float], **fields: Any) -> ProbeScore:
    """A probe that is all gold: one character and one token a log-probability."""
    size = len(full)
    values: dict[str, Any] = {
        "text": "x" * size,
        "gold_spans": [(0, size)],
        "token_ids": list(range(size)),
        "starts": list(range(size)),
        "ends": list(range(1, size + 1)),
        "core_tokens": size,
        "full_logprobs": full,
        "mem_logprobs": mem,
        "ahead_logprobs": [],
        "actor_logprobs": [],
    }
    return ProbeScore(**(values | fields))


def turn_score(
    of: Trajectory, index: int, full: list[float] | None = None, mem: list[float] | None = None
) -> TurnScore:
    """The score of turn ``index`` (1-based). Its probe is all gold: one character and one token a log-probability."""
    response = len(of.turns[index - 1].response_ids)
    probed = full is not None and mem is not None
    return TurnScore(
        question_id=of.question_id,
        sample_index=of.sample_index,
        turn=index,
        policy_version=of.policy_version,
        probes=[probe_score(full, mem)] if full is not None and mem is not None else [],
        mem_tokens=3,
        context_tokens=30,
        scorer="actor@0",
        reason=None if probed else ("first_turn" if index == 1 else "no_segment"),
        old_logprobs=[-0.5] * response,
        ref_logprobs=[0.0] * response,
    )

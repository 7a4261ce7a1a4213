"""Every reference value of tests/golden/*.json, made independently of this code in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mempo import advantages, loss, mem_reward, rewards, tags

HERE = Path(__file__).parent


def load(name: str) -> tuple[list[Any], float]:
    document = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    return document["cases"], document.get("tolerance", 0.0)


def cases(name: str) -> Any:
    return pytest.mark.parametrize("case", load(name)[0], ids=lambda case: case.get("name"))


def variants(name: str) -> Any:
    """One test for each expected value of each case."""
    pairs = [(case, expected) for case in load(name)[0] for expected in case["expected"]]
    return pytest.mark.parametrize(("case", "expected"), pairs, ids=[f"case{i}" for i in range(len(pairs))])


def near(name: str, expected: Any) -> Any:
    return pytest.approx(expected, abs=load(name)[1], rel=0)


def test_every_file_is_tested() -> None:
    named = {"answers", "protocol", "memory_reward", "turn_rewards", "outcome_advantage", "memory_advantage"}
    assert {path.stem for path in HERE.glob("*.json")} == named | {"token_weights", "policy_loss"}


@cases("answers")
@pytest.mark.parametrize("normalizer", ["auto", "squad", "unicode"])
def test_answers(case: Any, normalizer: rewards.Normalizer) -> None:
    score = rewards.score_answer(case["prediction"], case["golden_answers"], normalizer)
    assert score.em == case["em"]
    assert score.f1 == near("answers", case["f1"])


@cases("protocol")
def test_protocol(case: Any) -> None:
    parsed = tags.parse_turn(case["text"], case["turn"])
    found = {name: getattr(parsed, name) for name in ("valid", "memory", "action", "argument")}
    assert found == {name: case[name] for name in found}
    if parsed.memory_chars is not None:
        start, end = parsed.memory_chars
        assert case["text"][start:end] == f"<mem>{parsed.memory}</mem>"


@variants("memory_reward")
def test_memory_reward(case: Any, expected: Any) -> None:
    sides = (case["full_logprobs"], case["mem_logprobs"], case["answer_mask"])
    found = mem_reward.memory_reward(*sides, **expected["kwargs"])
    for name in ("p_full", "p_mem", "reward", "kept_full", "kept_mem"):
        assert getattr(found, name) == near("memory_reward", expected[name]), name


@variants("turn_rewards")
def test_turn_rewards(case: Any, expected: Any) -> None:
    sides = (case["p_full"], case["p_mem"], case["mem_tokens"], case["context_tokens"])
    assert mem_reward.turn_rewards(*sides, **expected["kwargs"]) == near("turn_rewards", expected["reward"])


@cases("outcome_advantage")
def test_outcome_advantage(case: Any) -> None:
    found = advantages.outcome_advantages(case["scores"], case["groups"])
    assert found == near("outcome_advantage", case["advantages"])


@cases("memory_advantage")
def test_memory_advantage(case: Any) -> None:
    found = advantages.memory_advantages(case["rewards"], case["groups"])
    tokens = [advantages.span_advantages(case["length"], s, v) for s, v in zip(case["spans"], found, strict=True)]
    for row, expected in zip(found, case["per_segment"], strict=True):
        assert row == near("memory_advantage", expected)
    for row, expected in zip(tokens, case["token_advantages"], strict=True):
        assert row == near("memory_advantage", expected)


@cases("token_weights")
@pytest.mark.parametrize("aggregation", ["token-mean", "turn-mean", "trajectory-mean", "constant"])
def test_token_weights(case: Any, aggregation: advantages.Aggregation) -> None:
    found = advantages.token_weights(
        case["num_tokens"],
        case["trajectory_ids"],
        aggregation=aggregation,
        max_response_tokens=case["max_response_tokens"],
    )
    assert found == near("token_weights", case["expected"][aggregation])


@variants("policy_loss")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_policy_loss(case: Any, expected: Any, dtype: torch.dtype) -> None:
    names = ("logprobs", "old_logprobs", "advantages", "weights", "ref_logprobs")
    inputs = [torch.tensor(case[name], dtype=dtype) for name in names]
    found, stats = loss.policy_loss(*inputs, **expected["kwargs"])
    assert found.item() == near("policy_loss", expected["loss"])
    assert stats["clip_fraction"] == near("policy_loss", expected["clip_fraction"])

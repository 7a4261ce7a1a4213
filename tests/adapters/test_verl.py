"""The estimator in verl's registered form: its signature, and the golden values through it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mempo.adapters.verl import memory_estimator
from mempo.config import Advantage

GOLDEN = Path(__file__).parents[1] / "golden"


def cases(name: str) -> Any:
    found = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    return pytest.mark.parametrize("case", found, ids=lambda case: case["name"])


def rows_of(values: list[Any]) -> np.ndarray:
    """As verl keeps what is no tensor: an object array, one entry a row."""
    rows = np.empty(len(values), dtype=object)
    rows[:] = values
    return rows


def called_by_verl(estimator: Any, rewards: torch.Tensor, mask: torch.Tensor, uids: list[str], segments: Any) -> Any:
    """The keyword arguments of ``compute_advantage`` (0.9.1) with ``non_tensor_batch`` and ``batch``, as for gdpo."""
    uid = np.array(uids, dtype=object)
    return estimator(
        token_level_rewards=rewards,
        response_mask=mask,
        config={"norm_adv_by_std_in_grpo": True},
        index=uid,
        non_tensor_batch={"uid": uid, "mem_segments": rows_of(segments)},
        batch={},
    )


def on_last_token(scores: list[float], length: int) -> torch.Tensor:
    rewards = torch.zeros(len(scores), length)
    rewards[:, -1] = torch.tensor(scores)
    return rewards


def test_signature_is_that_of_a_registered_estimator() -> None:
    parameters = inspect.signature(memory_estimator()).parameters
    assert list(parameters)[:4] == ["token_level_rewards", "response_mask", "index", "config"]
    assert parameters["config"].default is None
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds, "verl adds arguments from version to version"


@cases("memory_advantage")
def test_golden_memory_advantages(case: Any) -> None:
    """Equal scores: the outcome advantage is 0 and what is left is the memory's."""
    length, groups = case["length"], case["groups"]
    single = {group for group in groups if groups.count(group) == 1}
    # A group of one keeps its raw score, so that score is 0.
    scores = [0.0 if group in single else 1.0 for group in groups]
    segments = [
        [(start, end, reward) for (start, end), reward in zip(spans, rewards, strict=True)]
        for spans, rewards in zip(case["spans"], case["rewards"], strict=True)
    ]
    mask = torch.ones(len(groups), length)
    advantages, returns = called_by_verl(memory_estimator(), on_last_token(scores, length), mask, groups, segments)
    assert torch.equal(advantages, returns) and advantages.shape == mask.shape
    for found, expected in zip(advantages.tolist(), case["token_advantages"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@cases("outcome_advantage")
def test_golden_outcome_advantages(case: Any) -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0]] * len(case["scores"]))  # a tool spoke the second token
    none: list[Any] = [[] for _ in case["scores"]]
    found, _ = called_by_verl(memory_estimator(), on_last_token(case["scores"], 3), mask, case["groups"], none)
    assert found[:, 0].tolist() == pytest.approx(case["advantages"], abs=1e-5)
    assert found[:, 2].tolist() == found[:, 0].tolist() and not found[:, 1].any()


def test_sum_weight_gate_and_mask() -> None:
    """Scores 1, 0 -> 0.7071, -0.7071; memory rewards 0.3, 0.1 -> the same; a gate closes the second row's."""
    segments = [[(0, 2, 0.3)], [(0, 2, 0.1), (2, 3, None)]]
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    rewards = on_last_token([1.0, 0.0], 3)
    options = Advantage(mem_weight=0.5, gate="outcome_correct")
    found, _ = called_by_verl(memory_estimator(options), rewards, mask, ["a", "a"], segments)
    assert found[0].tolist() == pytest.approx([1.06066, 1.06066, 0.70711], abs=1e-4)
    assert found[1].tolist() == pytest.approx([-0.70711, 0.0, -0.70711], abs=1e-4)
    plain = memory_estimator()(
        rewards, mask, ["a", "a"], {"norm_adv_by_std_in_grpo": False}, {"mem_segments": [[], []]}
    )
    assert plain[0][0].tolist() == [0.5, 0.5, 0.5], "without division by the group's std"


def test_what_is_missing_or_outside_is_named() -> None:
    mask = torch.ones(1, 3)
    estimator, rewards = memory_estimator(), on_last_token([1.0], 3)
    with pytest.raises(ValueError, match=r"mem_segments.*missing"):
        estimator(rewards, mask, ["a"])
    with pytest.raises(ValueError, match="2 rows, the batch 1"):
        called_by_verl(estimator, rewards, mask, ["a"], [[], []])
    with pytest.raises(ValueError, match=r"row 0: \(2, 4\) is outside"):
        called_by_verl(estimator, rewards, mask, ["a"], [[(2, 4, 0.1)]])
    with pytest.raises(ValueError, match=r"advantage\.anneal_rounds"):
        memory_estimator(Advantage(anneal_rounds=3))

"""What a round must do by hand, how long that takes at least, and that measuring gives rates of this world."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from mempo.cli import app
from mempo.config import Config
from mempo.cost import PROBE_TOKENS, Phase, phases, product_flops, prompt_lengths, round_tokens
from mempo.engines.vllm_requests import score_paths
from mempo.floor import REACHED, Device, measure, reached
from mempo.footprint import kv_bytes, longest_turn
from mempo.probes import full_tree, memory_tree
from mempo.shapes import num_parameters, shape_of
from tests.unit.builders import turn

SMALL: dict[str, Any] = {
    "model": {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 16, "num_layers": 2, "num_heads": 2},
    "rollout": {"max_turns": 3, "max_prompt_tokens": 10, "max_response_tokens": 5, "block_questions": 1},
    "search": {"max_observation_tokens": 4},
    "loop": {"questions_per_round": 3, "group_size": 2},
    "optim": {"tokens_per_microbatch": 100},
}
PROMPTS = 10 + 19 + 19  # of a trajectory: its question, then with a turn of 5 + 4 behind it


def small(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({name: SMALL.get(name, {}) | sections.get(name, {}) for name in SMALL | sections})


def work(**sections: dict[str, Any]) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases(small(**sections))}


def test_products_by_hand() -> None:
    shape = shape_of(small().model)
    body = num_parameters(shape) - 300 * 8
    assert product_flops(shape, 7, 0) == 2 * 7 * body
    assert product_flops(shape, 7, 3) == 2 * (7 * body + 3 * 300 * 8)


@pytest.mark.parametrize(
    ("rule", "lengths"),
    [("memory", [10, 19, 19]), ("think", [10, 19, 19]), ("recent", [10, 19, 28]), ("full", [10, 19, 28])],
)
def test_prompts_grow_as_the_context_rule_has_it(rule: str, lengths: list[int]) -> None:
    config = small(rollout={"context": rule}, format={"require_memory": False}, advantage={"mem_weight": 0.0})
    assert prompt_lengths(config) == lengths and max(lengths) + 5 <= longest_turn(config)


def test_tokens_of_a_round_by_hand() -> None:
    # histories: 10 + 2 x 9 and two probes of 64; a question's tree has four memories of 5 with a probe each
    scored = 6 * (28 + 128) + 3 * (10 + 4 * 69)
    whole = {"prompt": 6 * PROMPTS, "generated": 6 * 15, "scored": scored, "trained": 6 * (PROMPTS + 15)}
    assert round_tokens(small()) == whole
    outcome = {"mem_weight": 0.0}
    assert round_tokens(small(advantage=outcome))["scored"] == 0
    # the reference reads every response after its prompt
    assert round_tokens(small(advantage=outcome, loss={"kl_coef": 0.1}))["scored"] == whole["trained"]


def test_scored_tokens_are_those_that_scoring_asks_for() -> None:
    """Six trajectories of three full turns: each a history, and each of three questions a tree of four memories."""
    probe, turns = [([1] * PROBE_TOKENS, PROBE_TOKENS)], [turn(10, 5, observation_ids=[7] * 4) for _ in range(3)]
    memories = memory_tree(turns[0].prompt_ids, [[[3] * 5]] * 4, probe)
    trees = 6 * [full_tree(turns, [1, 2], probe, "history")] + 3 * [memories]
    assert round_tokens(small())["scored"] == sum(map(len, trees))
    paths = score_paths(trees, temperature=1, window=1000)
    assert round_tokens(small(runtime={"engine": "vllm"}))["scored"] == sum(len(path) for _, path in paths)


def test_phases_by_hand() -> None:
    config, found = small(), work()
    shape = shape_of(config.model)
    weights = 4 * num_parameters(shape)
    assert found["prompts"].flops == product_flops(shape, 6 * PROMPTS, 0)
    assert found["prompts"].bytes == weights * 3 * 3  # three blocks of one question, three turns
    assert found["decoding"].flops == product_flops(shape, 90, 90)
    contexts = 6 * 5 * (PROMPTS + 3 * 2.5)  # each of five tokens reads its prompt and half a response
    assert found["decoding"].bytes == weights * 3 * 3 * 5 + contexts * kv_bytes(shape, config.runtime)
    assert found["update"].flops == 3 * product_flops(shape, 6 * (PROMPTS + 15), 90)
    assert found["update"].bytes == 3 * weights * 4  # 378 tokens are four micro-batches
    assert work(advantage={"mem_weight": 0.0})["score"] == Phase("score", 1, 0.0, 0.0)


def test_what_changes_the_work_of_an_update() -> None:
    shape = shape_of(small().model)
    forward = product_flops(shape, 6 * (PROMPTS + 15), 90)
    assert work(lora={"rank": 2})["update"].flops == 2 * forward  # no gradients of frozen weights
    again = work(runtime={"gradient_checkpointing": True})["update"].flops - 3 * forward
    assert again == product_flops(shape, 6 * (PROMPTS + 15), 0)


@pytest.mark.parametrize(
    ("runtime", "sections", "devices", "engines", "waves"),
    [
        ({"max_batch": 4}, {"rollout": {"block_questions": 3}}, 1, 1, 2),  # six trajectories, four at a time
        ({"engine": "vllm", "max_batch": 4}, {}, 1, 1, 2),
        ({"engine": "vllm", "vllm": {"tensor_parallel": 2, "servers": ["http://a:1", "http://b:1"]}}, {}, 4, 2, 1),
        ({}, {"shards": {"deployment": "shard/shard", "count": 3}}, 3, 3, 1),
    ],
)
def test_engines_share_a_round(
    runtime: dict[str, Any], sections: dict[str, Any], devices: int, engines: int, waves: int
) -> None:
    found = work(runtime=runtime, **sections)
    weights = 4 * num_parameters(shape_of(small().model))
    assert [found[name].devices for name in ("prompts", "decoding", "score")] == [devices] * 3
    assert found["prompts"].bytes == weights * engines * waves * 3
    assert found["score"].bytes == weights * engines


def test_a_cache_that_holds_few_contexts_makes_more_batches() -> None:
    config = small(runtime={"engine": "vllm"})
    whole, halved = (phases(config, tokens)[0].bytes for tokens in (6 * 24, 3 * 24 + 23))
    assert halved == 2 * whole
    assert phases(config, 0)[0].bytes == 6 * whole  # told as a misfit; the work of one at a time


def test_ranks_share_an_update() -> None:
    assert work(runtime={"trainer": "deepspeed", "deepspeed": {"ranks": 4}})["update"].devices == 4


def test_the_slower_of_two_limits_is_the_floor() -> None:
    phase = Phase("update", 2, 12.0, 30.0)
    assert (Device(3.0, 30.0).floor(phase), Device(3.0, 30.0).bound(phase)) == (2.0, "FLOPs")
    assert (Device(12.0, 5.0).floor(phase), Device(12.0, 5.0).bound(phase)) == (3.0, "bytes")


def test_a_share_that_is_told_takes_the_place_of_the_measured_one() -> None:
    assert reached(["score=0.25"]) == {**REACHED, "score": 0.25}


def test_a_machine_is_measured() -> None:
    device = measure(repeats=1)
    assert 1e8 < device.flop_rate < 1e15 and 1e7 < device.bandwidth < 1e13


def test_the_command_tells_every_phase() -> None:
    told = CliRunner().invoke(app, ["bench", "floor"])
    assert told.exit_code == 0, told.output
    assert all(phase in told.output for phase in ("prompts", "decoding", "score", "update", "TFLOP/s"))

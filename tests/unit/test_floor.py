"""The floor of a round by hand, and that measuring gives rates of this world."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mempo.cli import app
from mempo.config import Config
from mempo.floor import Machine, floors, measure, product_flops
from mempo.shapes import num_parameters, shape_of

SMALL = {
    "model": {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 16, "num_layers": 2, "num_heads": 2},
    "rollout": {"max_turns": 2, "max_prompt_tokens": 10, "max_response_tokens": 5, "block_questions": 1},
    "search": {"max_observation_tokens": 4},
    "loop": {"questions_per_round": 3, "group_size": 2},
    "optim": {"tokens_per_microbatch": 100},
}


def test_products_by_hand() -> None:
    shape = shape_of(Config.model_validate(SMALL).model)
    body = num_parameters(shape) - 300 * 8
    assert product_flops(shape, 7, 0) == 2 * 7 * body
    assert product_flops(shape, 7, 3) == 2 * (7 * body + 3 * 300 * 8)
    assert product_flops(shape, 7, 3, backward=True) == 3 * product_flops(shape, 7, 3)


def test_floors_by_hand() -> None:
    config = Config.model_validate(SMALL)
    shape = shape_of(config.model)
    prompts, decoding, score, update = floors(config)
    turns, weights = 3 * 2 * 2, 4 * num_parameters(shape)
    assert prompts.flops == product_flops(shape, turns * (10 + 5 + 4), 0)
    assert decoding.flops == product_flops(shape, turns * 5, turns * 5)
    assert decoding.bytes == weights * 2 * 5 * 3  # three blocks of one question decode after each other
    trained = turns * (10 + 5 + 4 + 5)
    assert update.flops == product_flops(shape, trained, turns * 5, backward=True)
    assert update.bytes == 3 * weights * 3  # 288 tokens are three micro-batches
    outcome = Config.model_validate(SMALL | {"advantage": {"mem_weight": 0.0}})
    assert score.flops > 0 and floors(outcome)[2].flops == 0 == floors(outcome)[2].bytes


def test_the_slower_of_two_limits_is_the_floor() -> None:
    floor = floors(Config.model_validate(SMALL))[1]
    assert floor.seconds(Machine(floor.flops / 2, floor.bytes, 1)) == pytest.approx(2.0)
    assert floor.seconds(Machine(floor.flops, floor.bytes / 3, 1)) == pytest.approx(3.0)


def test_a_machine_is_measured() -> None:
    machine = measure(repeats=1)
    assert 1e8 < machine.flop_rate < 1e15 and 1e7 < machine.bandwidth < 1e13


def test_the_command_tells_every_phase() -> None:
    told = CliRunner().invoke(app, ["bench", "floor"])
    assert told.exit_code == 0, told.output
    assert all(phase in told.output for phase in ("prompts", "decoding", "score", "update", "GFLOP/s"))

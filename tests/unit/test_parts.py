"""How a round is cut into parts and shares; what makes a part is tried in tests/flow/test_shards.py."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mempo.config import Config
from mempo.params import ConfigError, load_config
from tasks.parts import Part, shares, split


def config(questions: int, block: int, **others: dict[str, Any]) -> Config:
    sections = {"loop": {"questions_per_round": questions}, "rollout": {"block_questions": block}}
    return Config.model_validate(sections | others)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_shares_hold_every_question_once_in_order_and_never_cut_a_block(questions: int, block: int, count: int) -> None:
    parts = split("rollout", config(questions, block))
    held = shares(parts, count)
    assert len(held) == min(count, len(parts)) and all(held)
    assert list(chain.from_iterable(held)) == parts
    asked = [question for part in parts for question in range(part.first, part.end)]
    assert asked == list(range(questions))
    assert all(part.first % block == 0 and part.end - part.first <= block for part in parts)
    sizes = [len(share) for share in held]
    assert max(sizes) - min(sizes) <= 1


def test_parts_of_hf_do_not_depend_on_the_shards() -> None:
    spread = {"deployment": "shard/shard", "count": 3}
    assert split("score", config(8, 2)) == split("score", config(8, 2, shards=spread))
    assert split("rollout", config(8, 3)) == [Part("rollout", 0, 3), Part("rollout", 3, 6), Part("rollout", 6, 8)]


def test_vllm_gets_as_much_at_once_as_there_is_for_a_shard() -> None:
    engine = {"engine": "vllm"}
    assert split("rollout", config(8, 2, runtime=engine)) == [Part("rollout", 0, 8)]
    spread = {"deployment": "shard/shard", "count": 3}
    ends = [part.end for part in split("rollout", config(8, 2, runtime=engine, shards=spread))]
    assert ends == [3, 6, 8]


@pytest.mark.parametrize("phase", ["update", "check", "diagnose"])
def test_what_cannot_be_cut_is_one_part(phase: Any) -> None:
    assert split(phase, config(8, 2)) == [Part(phase, 0, 8)]


def test_more_shards_than_blocks_are_refused_by_name() -> None:
    settings = ["loop.questions_per_round=8", "rollout.block_questions=3", "shards.count=4"]
    with pytest.raises(ConfigError, match=r"shards\.count: 4 runs, and a round of 8 questions has 3 blocks"):
        load_config(None, settings)
    assert load_config(None, [*settings[:2], "shards.count=3"]).shards.count == 3

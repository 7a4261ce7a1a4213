"""Padding: two turns of unequal length, on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st

from mempo.batch import collate
from mempo.mismatch import sampler_weights
from mempo.records import Sample

# turn 1: prompt 10 11, response 12 13 14; turn 2: prompt 20, response 21 22 23 24 25 with <mem> on 21-23
FIRST = Sample(
    "q/0/1", [10, 11, 12, 13, 14], [0, 0, 1, 1, 1], [0, 0, -1.0, -1.5, -2.0], [0, 0, -1, -1, -1], 0.5, [0.0] * 5, 0.25
)
SECOND = Sample(
    "q/0/2",
    [20, 21, 22, 23, 24, 25],
    [0, 1, 1, 1, 1, 1],
    [0, -0.1, -0.2, -0.3, -0.4, -0.5],
    [0.0] * 6,
    0.5,
    [0, 2.0, 2.0, 2.0, 0, 0],
    0.125,
)


def test_right_padding() -> None:
    batch = collate([FIRST, SECOND], pad_id=7)
    assert batch.token_ids.tolist() == [[10, 11, 12, 13, 14, 7], [20, 21, 22, 23, 24, 25]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5]]
    assert batch.old_logprobs[0].tolist() == [0, 0, -1.0, -1.5, -2.0, 0]
    assert batch.weights.tolist() == [[0, 0, 0.25, 0.25, 0.25, 0], [0, 0.125, 0.125, 0.125, 0.125, 0.125]]


def test_left_padding() -> None:
    batch = collate([FIRST, SECOND], pad_id=7, side="left")
    assert batch.token_ids[0].tolist() == [7, 10, 11, 12, 13, 14]
    assert batch.attention_mask[0].tolist() == [0, 1, 1, 1, 1, 1]
    assert batch.position_ids[0].tolist() == [0, 0, 1, 2, 3, 4]
    assert batch.weights[0].tolist() == [0, 0, 0, 0.25, 0.25, 0.25]


def test_the_samplers_weights_multiply_the_samples() -> None:
    corrected = replace(FIRST, sampler_weights=[9.0, 9.0, 2.0, 1.0, 0.5])
    batch = collate([corrected, SECOND], pad_id=7)
    assert batch.weights.tolist() == [[0, 0, 0.5, 0.25, 0.125, 0], [0, 0.125, 0.125, 0.125, 0.125, 0.125]]
    plain = collate([FIRST, SECOND], pad_id=7)
    assert all(getattr(batch, n).equal(getattr(plain, n)) for n in batch.__slots__ if n != "weights")


@given(
    st.lists(st.tuples(st.integers(0, 1), st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=9),
    st.floats(0, 1),
    st.sampled_from(["none", "token", "sequence"]),
)
def test_without_a_correction_weights_are_the_samples_to_the_bit(rows: Any, weight: float, correction: Any) -> None:
    mask, old, sampling = ([row[i] for row in rows] for i in range(3))
    zeros = [0.0] * len(rows)
    found = sampler_weights(old, sampling, correction=correction, cap=2.0)
    (row,) = collate([Sample("q/0/1", mask, mask, old, zeros, 1.0, zeros, weight, found)], pad_id=0).weights
    plain = torch.tensor([weight * on for on in mask], dtype=torch.float32)
    if correction == "none":
        assert row.equal(plain)
    assert not row[plain == 0].any()
    assert (row <= 2 * plain).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_sum_over_the_mask_is_known_by_hand(side: Literal["left", "right"]) -> None:
    batch = collate([FIRST, SECOND], pad_id=0, side=side)
    # both turns carry the outcome 0.5: 3 tokens and 5 tokens; the segment's 3 tokens carry 2.0 more: 1.5 + 2.5 + 6
    assert batch.advantages.sum().item() == 10.0
    assert sorted(set(batch.advantages.flatten().tolist())) == [0.0, 0.5, 2.5]
    assert (batch.advantages == 2.5).sum().item() == 3
    assert (batch.weights != 0).sum().item() == 8
    # sum of weight * advantage: 0.25 * 1.5 + 0.125 * (2.5 + 6)
    assert (batch.weights * batch.advantages).sum().item() == pytest.approx(1.4375)


def test_every_tensor_is_batch_by_tokens_and_moves() -> None:
    batch = collate([FIRST, SECOND], pad_id=0).to("cpu")
    for name in batch.__slots__:
        assert getattr(batch, name).shape == (2, 6)
    assert batch.token_ids.dtype == torch.long
    assert batch.weights.dtype == torch.float32

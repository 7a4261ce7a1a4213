"""Padding: two turns of unequal length, on both sides."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from mempo.batch import collate
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

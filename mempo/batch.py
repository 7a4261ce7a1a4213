"""Samples become tensors: the only place that pads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mempo.advantages import token_advantages
from mempo.records import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors [B, T]. Padding and prompt tokens have weight 0; the mask and the position ids are the model's inputs."""

    token_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__slots__))


def collate(samples: Sequence[Sample], pad_id: int, side: Literal["left", "right"] = "right") -> Batch:
    """B samples padded to the longest, T = its length. Token t has its advantage and weight at index t.

    A loss token's weight is the sample's times the sampler's (``mismatch.sampler_weights``). ``position_ids`` count
    from 0 at a row's first own token; they are 0 on padding.
    """
    length = max(len(sample.token_ids) for sample in samples)

    def padded(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(rows), length), value, dtype=dtype)
        for i, row in enumerate(rows):
            start = length - len(row) if side == "left" else 0
            out[i, start : start + len(row)] = torch.tensor(row, dtype=dtype)
        return out

    lengths = [len(sample.token_ids) for sample in samples]
    return Batch(
        token_ids=padded([s.token_ids for s in samples], pad_id, torch.long),
        attention_mask=padded([[1] * n for n in lengths], 0, torch.long),
        position_ids=padded([range(n) for n in lengths], 0, torch.long),
        old_logprobs=padded([s.old_logprobs for s in samples], 0.0, torch.float32),
        ref_logprobs=padded([s.ref_logprobs for s in samples], 0.0, torch.float32),
        advantages=padded(
            [token_advantages(s.outcome_advantage, s.memory_advantages, s.loss_mask) for s in samples],
            0.0,
            torch.float32,
        ),
        weights=padded(
            [[s.weight * on * w for on, w in zip(s.loss_mask, s.sampler_weights, strict=True)] for s in samples],
            0.0,
            torch.float32,
        ),
    )

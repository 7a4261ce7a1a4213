"""A batch of rows on a model: its cache, its masks and positions.

``PlainDecoder`` reads the beginning that a group of prompts shares once, then spreads it over the group's rows.
``PaddedDecoder`` asks nothing special of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mempo.engines.prefixes import shared_starts


class Cache:
    """Keys and values of a plain causal model, per layer [B, heads, capacity, D]; ``length`` columns are filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: store the new columns, return all columns so far."""
        end = self.length + key.shape[2]
        if layer == len(self.layers):
            self.layers.append((_roomy(key, len(key), self.capacity), _roomy(value, len(value), self.capacity)))
        keys, values = self.layers[layer]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def spread(self, rows: Tensor, capacity: int) -> Cache:
        """Another one: its line b is line ``rows[b]`` of this, with room for ``capacity`` columns."""
        made = Cache(capacity)
        made.length = self.length
        made.layers = [
            (self._wider(keys, rows, capacity), self._wider(values, rows, capacity)) for keys, values in self.layers
        ]
        return made

    def _wider(self, states: Tensor, rows: Tensor, capacity: int) -> Tensor:
        wider = _roomy(states, len(rows), capacity)
        wider[:, :, : self.length] = states[:, :, : self.length][rows]
        return wider

    # What a model's mask code asks a cache where no mask is given.
    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0


def _roomy(like: Tensor, rows: int, capacity: int) -> Tensor:
    return like.new_empty(rows, like.shape[1], capacity, like.shape[3])


class PlainDecoder:
    """Rows padded right after every part read, and our own cache: for models whose attention is plain causal.

    A part of n tokens fills n columns in every row; ``blocked`` [B, capacity] holds -inf at a row's padding columns.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = model.get_output_embeddings()

    def prefill(self, prompts: Sequence[list[int]], max_tokens: int) -> Tensor:
        device = self.model.device
        starts, group_of = shared_starts(prompts)
        rests = [prompt[len(starts[group]) :] for prompt, group in zip(prompts, group_of, strict=True)]
        width = max(map(len, starts))
        self.cache = Cache(width)
        self.positions = torch.zeros(len(starts), dtype=torch.long, device=device)
        self.blocked = torch.zeros(len(starts), width, dtype=self.model.dtype, device=device)
        if width:
            self._read(starts)
        capacity = width + max(map(len, rests)) + max_tokens
        rows = torch.tensor(group_of, device=device)
        self.cache = self.cache.spread(rows, capacity)
        self.positions = self.positions[rows]
        room = self.blocked.new_zeros(len(rows), capacity - width)
        self.blocked = torch.cat([self.blocked[rows], room], -1)
        hidden = self._read(rests)
        last = torch.tensor([len(rest) - 1 for rest in rests], device=device)
        return self.head(hidden[torch.arange(len(rests), device=device), last])  # type: ignore[no-any-return]

    def step(self, token_ids: Tensor) -> Tensor:
        hidden = self._forward(token_ids[:, None], self.positions[:, None])
        self.positions = self.positions + 1
        return self.head(hidden[:, 0])  # type: ignore[no-any-return]

    def keep(self, rows: Tensor) -> None:
        self.cache = self.cache.spread(rows, self.cache.capacity)
        self.positions, self.blocked = self.positions[rows], self.blocked[rows]

    def _read(self, parts: Sequence[list[int]]) -> Tensor:
        """Hidden states [B, n, D] of one more part of each row; shorter ones are padded right, then blocked."""
        lengths = torch.tensor([len(part) for part in parts])
        width = int(lengths.max())
        token_ids = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self.model.device)
        lengths = lengths.to(self.model.device)
        steps = torch.arange(width, device=self.model.device)
        start = self.cache.length
        hidden = self._forward(token_ids, self.positions[:, None] + steps)
        padding = steps >= lengths[:, None]
        self.blocked[:, start : start + width].masked_fill_(padding, float("-inf"))
        self.positions = self.positions + lengths
        return hidden

    def _forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        start, width = self.cache.length, token_ids.shape[1]
        mask = self.blocked[:, None, None, : start + width]
        if width > 1:
            mask = mask.repeat(1, 1, width, 1)
            mask[..., start:].masked_fill_(torch.ones(width, width, device=mask.device).triu(1).bool(), float("-inf"))
        hidden = self.model.base_model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask if start else None,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        self.cache.length += width
        return hidden  # type: ignore[no-any-return]


class PaddedDecoder:
    """Left-padded rows and the model's own cache: for every other causal model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, prompts: Sequence[list[int]], max_tokens: int) -> Tensor:
        width = max(map(len, prompts))
        token_ids = torch.zeros(len(prompts), width, dtype=torch.long, device=self.model.device)
        self.mask = torch.zeros_like(token_ids)
        for line, prompt in enumerate(prompts):
            token_ids[line, width - len(prompt) :] = torch.tensor(prompt)
            self.mask[line, width - len(prompt) :] = 1
        self.cache = None
        return self._forward(token_ids, (self.mask.cumsum(-1) - 1).clamp(min=0))

    def step(self, token_ids: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], -1)
        # A finished row that has not left yet may stand at the window's end; learned positions have no entry beyond it.
        last = self.model.config.get_text_config().max_position_embeddings - 1
        return self._forward(token_ids[:, None], (self.mask.sum(-1, keepdim=True) - 1).clamp(max=last))

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)  # type: ignore[attr-defined]
        self.mask = self.mask[rows]

    def _forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=token_ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = output.past_key_values
        return output.logits[:, -1]  # type: ignore[no-any-return]

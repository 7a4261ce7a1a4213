"""The decoding loop: prompts in, sampled tokens and their log-probabilities out.

All rows step together; finished rows leave. A row's tokens depend on its prompt and seed, not on its neighbours: its
uniform numbers are drawn from its own counter-based generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mempo.engines import Generation, Sampling
from mempo.records import FinishReason

SHRINK_AT = 0.75  # the batch is cut to its unfinished rows when their share has fallen to this


@dataclass(slots=True)
class Row:
    """One request in flight."""

    prompt_ids: list[int]
    seed: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def generation(self) -> Generation:
        return Generation(self.token_ids, self.logprobs, self.finish_reason)


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a turn. ``closing`` are the tokens whose text holds the last character of a stop string."""

    tokenizer: Any
    end_ids: frozenset[int]
    texts: tuple[str, ...]
    closing: frozenset[int]

    def reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Why generation ends at the last of ``token_ids``; a stop string may end inside that token."""
        if token_ids[-1] in self.end_ids:
            return "eos"
        if token_ids[-1] not in self.closing:
            return None
        # Each character of a stop string is ASCII, so it stands in at most as many tokens as it has characters.
        tail = token_ids[-max(map(len, self.texts)) :]
        text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return "stop" if any(stop in text for stop in self.texts) else None


def room(prompt_ids: Sequence[int], sampling: Sampling, window: int) -> int:
    """Tokens that may be sampled after a prompt. Raises ``ValueError`` where not a single one fits."""
    left = min(sampling.max_tokens, window - len(prompt_ids))
    if not prompt_ids or left < 1:
        raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in a window of {window}")
    return left


def make_stops(tokenizer: Any, end_ids: frozenset[int], texts: tuple[str, ...]) -> Stops:
    last = {text[-1] for text in texts}
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    closing = frozenset(index for index, token in enumerate(tokens) if token and any(mark in token for mark in last))
    return Stops(tokenizer, end_ids, texts, closing)


class Decoder(Protocol):
    """A batch of rows on a model: ``prefill`` reads prompts, ``step`` one token a row; both return logits [B, V]."""

    def prefill(self, prompts: Sequence[list[int]], max_tokens: int) -> Tensor: ...

    def step(self, token_ids: Tensor) -> Tensor: ...

    def keep(self, rows: Tensor) -> None: ...


@torch.inference_mode()
def decode(decoder: Decoder, rows: Sequence[Row], sampling: Sampling, stops: Stops) -> None:
    """Fill ``rows`` with tokens until each has stopped, ended its turn or reached its ``max_tokens``."""
    budget = max(row.max_tokens for row in rows)
    draws = np.stack([np.random.Generator(np.random.Philox(key=row.seed)).random(budget) for row in rows])
    logits = decoder.prefill([row.prompt_ids for row in rows], budget)
    uniforms = torch.from_numpy(draws).to(logits.device)
    active = list(range(len(rows)))  # the row behind each line of the batch; finished ones stay until the batch shrinks
    live = [True] * len(rows)
    for step in range(budget):
        token_ids, logprobs = sample(logits, uniforms[:, step], sampling)
        for index, token, logprob in zip(active, token_ids.tolist(), logprobs.tolist(), strict=True):
            if live[index]:
                live[index] = _append(rows[index], token, logprob, stops)
        kept = [line for line, index in enumerate(active) if live[index]]
        if not kept:
            return
        if len(kept) <= SHRINK_AT * len(active):
            chosen = torch.tensor(kept, device=logits.device)
            decoder.keep(chosen)
            active = [active[line] for line in kept]
            token_ids, uniforms = token_ids[chosen], uniforms[chosen]
        logits = decoder.step(token_ids)


def _append(row: Row, token: int, logprob: float, stops: Stops) -> bool:
    """Add a token to ``row``; whether the row goes on."""
    row.token_ids.append(token)
    row.logprobs.append(logprob)
    reason = stops.reason(row.token_ids)
    if reason is not None:
        row.finish_reason = reason
    return reason is None and len(row.token_ids) < row.max_tokens


def sample(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens [B] by inverse transform of ``uniforms`` [B] in [0, 1), and their log-probabilities [B] in float32."""
    greedy = sampling.temperature == 0
    scaled = logits.float() if greedy else logits.float() / sampling.temperature
    logprobs = filtered(scaled, sampling).log_softmax(-1)
    if greedy:
        token_ids = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        targets = uniforms * cumulative[:, -1]
        token_ids = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    return token_ids, logprobs.gather(1, token_ids[:, None])[:, 0]


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits outside the ``top_k`` best, then outside the smallest set of probability ``top_p``, become -inf."""
    if sampling.top_k > 0:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(outside, float("-inf"))
    return logits

"""Sampled tokens read as a turn: its text, its parse, and where its memory stands among the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mempo import tags
from mempo.records import FinishReason, Turn


def read_turn(
    tokenizer: Any,
    prompt_ids: list[int],
    response_ids: list[int],
    number: int,
    *,
    sampling_logprobs: Sequence[float] | None = None,
    finish_reason: FinishReason = "stop",
    require_memory: bool = True,
) -> Turn:
    """The turn ``number``, counted from 1, not yet observed.

    An end-of-turn token (``finish_reason`` ``eos``) is in the ids and not in the text. Without ``sampling_logprobs``,
    which no memory reward reads, they are 0.
    """
    text, offsets = tags.token_offsets(tokenizer, response_ids)
    if finish_reason == "eos":
        text = text[: offsets[-1][0]]
    parsed = tags.parse_turn(text, number, require_memory=require_memory)
    return Turn(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        sampling_logprobs=[0.0] * len(response_ids) if sampling_logprobs is None else list(sampling_logprobs),
        text=text,
        valid=parsed.valid,
        memory=parsed.memory,
        mem_span=tags.token_span(offsets, parsed.memory_chars) if parsed.memory_chars else None,
        action=parsed.action,
        argument=parsed.argument,
        observation=None,
        observation_ids=[],
        finish_reason=finish_reason,
    )

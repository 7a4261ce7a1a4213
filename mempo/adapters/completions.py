"""What the adapters share: a completion read as a trajectory, and options that their host decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mempo import tags
from mempo.records import Trajectory, Turn
from mempo.sections import Section
from mempo.turns import read_turn

Span = tuple[int, int]


def read_completion(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    written: Sequence[int] | None = None,
    *,
    question_id: str = "",
    sample_index: int = 0,
) -> tuple[Trajectory, list[Span]]:
    """A completion as turns that begin where the model begins to write and at each whole ``<mem>..</mem>`` within.

    ``written`` [C]: 1 for the model's tokens, 0 for a tool's; a tag in what a tool says is text. ``prompt_ids`` of a
    turn are all tokens before it: the full history of a segment is the prompt and the completion up to that segment.
    Also returns the token span of each turn's segment in the completion, (0, 0) where it has none.
    """
    turns: list[Turn] = []
    spans: list[Span] = []
    pieces = list(_pieces(tokenizer, completion_ids, written or [1] * len(completion_ids)))
    for number, (start, end, after) in enumerate(pieces, start=1):
        turn = read_turn(tokenizer, [*prompt_ids, *completion_ids[:start]], list(completion_ids[start:end]), number)
        spans.append((start + turn.mem_span[0], start + turn.mem_span[1]) if turn.mem_span else (0, 0))
        turns.append(replace(turn, observation_ids=list(completion_ids[end:after])))
    return Trajectory(question_id, sample_index, 0, turns, None, "answered"), spans


def _pieces(tokenizer: Any, ids: Sequence[int], written: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, where the next begins) of each turn; between its end and the next one speak the tools."""
    edges = [t for t in range(len(ids)) if written[t] and (t == 0 or not written[t - 1])]
    for begin, after in zip(edges, [*edges, len(ids)][1:], strict=True):
        end = next((t for t in range(begin, after) if not written[t]), after)
        text, offsets = tags.token_offsets(tokenizer, ids[begin:end])
        starts = sorted({begin, *(begin + tags.token_span(offsets, chars)[0] for chars in _memories(text))})
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            yield start, stop, after if stop == end else stop


def _memories(text: str) -> Iterator[Span]:
    """Character spans of all whole segments, by the rules of ``tags.parse_turn``, which reads the first."""
    done = 0
    while (chars := tags.parse_turn(text[done:], 2).memory_chars) is not None:
        yield done + chars[0], done + chars[1]
        done += chars[1]


def refuse_changed(section: Section, reasons: Mapping[str, str], name: str) -> None:
    """Raises ``ValueError`` for an option of the section ``name`` in ``reasons`` that is not at its default."""
    for option, reason in reasons.items():
        value, default = getattr(section, option), type(section).model_fields[option].default
        if value != default:
            raise ValueError(f"{name}.{option}: {value!r} has no effect in this trainer: {reason}")

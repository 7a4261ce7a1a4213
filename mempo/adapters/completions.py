"""What the adapters share: a completion read as a trajectory, and what each ``<mem>`` adds to the outcome advantage."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from mempo import advantages, tags
from mempo.config import Advantage, Section
from mempo.records import Trajectory, Turn

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
        ids = list(completion_ids[start:end])
        text, offsets = tags.token_offsets(tokenizer, ids)
        parsed = tags.parse_turn(text, number)
        span = tags.token_span(offsets, parsed.memory_chars) if parsed.memory_chars else None
        spans.append((start + span[0], start + span[1]) if span else (0, 0))
        turns.append(
            Turn(
                prompt_ids=[*prompt_ids, *completion_ids[:start]],
                response_ids=ids,
                sampling_logprobs=[0.0] * len(ids),
                text=text,
                valid=parsed.valid,
                memory=parsed.memory,
                mem_span=span,
                action=parsed.action,
                argument=parsed.argument,
                observation=None,
                observation_ids=list(completion_ids[end:after]),
                finish_reason="stop",
            )
        )
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


def memory_terms(
    outcomes: Sequence[float],
    outcome_advantages: Sequence[float],
    rewards: Sequence[Sequence[float | None]],
    groups: Sequence[Hashable],
    options: Advantage,
    *,
    weight: float,
    turns: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Per completion and segment: weight * gate * memory advantage, which its tokens get beside the outcome's."""
    memory = advantages.memory_advantages(
        rewards,
        [str(group) for group in groups],
        turns=turns,
        pool=options.pool,
        single=options.single,
        std_floor=options.std_floor,
        normalize_std=options.mem_normalize_std,
    )
    gates = advantages.gates(outcomes, outcome_advantages, rule=options.gate)
    terms = [[weight * gate * value for value in row] for gate, row in zip(gates, memory, strict=True)]
    return advantages.unit_variance(outcome_advantages, terms, rewards) if options.unit_variance else terms


def refuse_changed(section: Section, reasons: Mapping[str, str], name: str) -> None:
    """Raises ``ValueError`` for an option of the section ``name`` in ``reasons`` that is not at its default."""
    for option, reason in reasons.items():
        value, default = getattr(section, option), type(section).model_fields[option].default
        if value != default:
            raise ValueError(f"{name}.{option}: {value!r} has no effect in this trainer: {reason}")

"""Memories to stand in for a turn's own: complete ones, spoilt ones, and contexts that are merely short.

What a memory should hold is known where the data knows its facts. All draws come from the ``random`` that is passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, cast

from mempo.data import Truth
from mempo.data.demos import Item
from mempo.data.geo import Relation
from mempo.probes import segment_ids
from mempo.prompts import encode_frame, encode_text
from mempo.quality import known_hops
from mempo.records import Trajectory, Turn

Kind = Literal["own", "complete", "dropped", "wrong", "empty", "other", "shuffled", "none"]
Key = tuple[str, int, int]  # question, sample, turn from 1
Facts = Mapping[str, Sequence[Truth]]  # by question, an entry an objective


@dataclass(frozen=True, slots=True)
class Memory:
    """What a memory says between its tags, and its tokens with them; no memory at all has no tokens."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Standin:
    key: Key
    kind: Kind
    memory: Memory


def memory_turns(trajectories: Sequence[Trajectory]) -> dict[Key, Turn]:
    """Every turn with a memory, from the second on."""
    return {
        (trajectory.question_id, trajectory.sample_index, number): turn
        for trajectory in trajectories
        for number, turn in enumerate(trajectory.turns, start=1)
        if number > 1 and turn.mem_span is not None
    }


def memories(tokenizer: Any, turns: Mapping[Key, Turn]) -> dict[Key, Memory]:
    return {key: Memory(turn.memory or "", segment_ids(tokenizer, turn, key[2])) for key, turn in turns.items()}


def standins(
    tokenizer: Any, trajectory: Trajectory, number: int, found: Mapping[Key, Memory], facts: Facts, random: Random
) -> Iterator[Standin]:
    """All that can stand in for turn ``number``, its own memory first.

    ``other``: that of another question, of the nearest number of tokens. ``shuffled``: its own words in another order.
    ``none``: no ``<mem>`` at all. Left out is what cannot be made: a wrong value where the round knows no second one.
    """
    key = (trajectory.question_id, trajectory.sample_index, number)
    own = found[key]
    yield Standin(key, "own", own)
    yield Standin(key, "none", Memory("", []))
    if others := [memory for where, memory in found.items() if where[0] != trajectory.question_id]:
        gaps = [abs(len(memory.token_ids) - len(own.token_ids)) for memory in others]
        nearest = [memory for memory, gap in zip(others, gaps, strict=True) if gap == min(gaps)]
        yield Standin(key, "other", random.choice(nearest))
    if mixed := shuffled(own.text, random):
        yield Standin(key, "shuffled", _memory(tokenizer, mixed))
    round_facts = {name: facts[name] for name, *_ in found if name in facts}
    items = known_items(trajectory, number, facts)
    for kind, text in spoilt(items, _wrong_values(trajectory.question_id, round_facts), random):
        yield Standin(key, kind, _memory(tokenizer, text))


def known_items(trajectory: Trajectory, number: int, facts: Facts) -> list[Item]:
    """What the memory of turn ``number`` should hold: of each objective the furthest value observed before it."""
    observations = [turn.observation for turn in trajectory.turns[: number - 1] if turn.observation]
    items = []
    for truth in facts.get(trajectory.question_id, []):
        if hops := known_hops(truth.chain, observations):
            relation, value = cast(Relation, truth.relations[hops - 1]), truth.values[hops - 1]
            items.append(Item(truth.objective, truth.ordinal, hops - 1, hops == len(truth.values), relation, value))
    return items


def spoilt(items: Sequence[Item], wrong: Mapping[str, Sequence[str]], random: Random) -> Iterator[tuple[Kind, str]]:
    """The complete memory, the same with one item dropped (of two at least), with one item wrong, and an empty one."""
    yield "empty", ""
    if not items:
        return
    yield "complete", _text(items)
    at = random.randrange(len(items))
    if len(items) > 1:
        yield "dropped", _text([*items[:at], *items[at + 1 :]])
    if values := wrong.get(items[at].relation):
        yield "wrong", _text([*items[:at], replace(items[at], value=random.choice(values)), *items[at + 1 :]])


def shuffled(text: str, random: Random) -> str:
    """The words of ``text`` in another order; empty where there is none."""
    words = text.split()
    mixed = words
    while mixed == words and len(set(words)) > 1:
        mixed = random.sample(words, len(words))
    return " ".join(mixed) if mixed != words else ""


def _wrong_values(question_id: str, facts: Facts) -> dict[str, list[str]]:
    """By relation, the values of the round's other questions that are nowhere in this one's facts."""
    right = {value for truth in facts.get(question_id, []) for value in truth.values}
    values: dict[str, set[str]] = {}
    for truth in (truth for truths in facts.values() for truth in truths):
        for relation, value in zip(truth.relations, truth.values, strict=True):
            if value not in right:
                values.setdefault(relation, set()).add(value)
    return {relation: sorted(some) for relation, some in values.items()}


def _text(items: Sequence[Item]) -> str:
    return "; ".join(item.text for item in items)


def _memory(tokenizer: Any, text: str) -> Memory:
    # As a policy would write it, in one piece; a text that spells a special token stays text.
    if any(token in text for token in tokenizer.get_added_vocab()):
        ids = [*encode_frame(tokenizer, "<mem>"), *encode_text(tokenizer, text), *encode_frame(tokenizer, "</mem>")]
    else:
        ids = encode_frame(tokenizer, f"<mem>{text}</mem>")
    return Memory(text, ids)

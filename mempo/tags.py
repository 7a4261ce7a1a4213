"""The turn format: ``[<mem>..</mem>] <think>..</think> (<search>..</search> | <answer>..</answer>)``.

Tags are case-sensitive and take no attributes. Segments are found in the text and mapped to tokens by offsets, never by
token ids: in real vocabularies the edge of a tag merges with its neighbour (``</mem><think>`` holds the token ``><``).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from mempo.records import Action

Span = tuple[int, int]

_NAMES = "mem|think|search|answer|information"
# From an opening tag to its own closing tag, or to the end of a text that was cut off: what stands inside is inside,
# whether or not the closing tag has come yet. One pass, so hostile text costs no more than its length.
_BLOCK = re.compile(rf"<({_NAMES})>(.*?)(</\1>|\Z)", re.DOTALL)
TAG = re.compile(rf"</?(?:{_NAMES})>")
_CHAT_MARKER = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>")
_BROKEN = "\ufffd"  # what a decoder writes for bytes that are not a whole character


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """``memory_chars`` span the characters of ``<mem>..</mem>``; ``memory`` is what stands between, unaltered."""

    valid: bool
    memory: str | None
    action: Action | None
    argument: str | None
    memory_chars: Span | None


def parse_turn(text: str, turn: int, *, require_memory: bool = True) -> ParsedTurn:
    """Read one turn (counted from 1): the first whole ``<mem>`` block, the first whole action block that is not empty.

    A block that was cut off or holds a protocol tag is neither. ``valid``: the blocks in order with white space between
    them, no other tag, no chat marker, and a memory from turn 2 on where it is required. Chat markers are taken out of
    the argument.
    """
    order: list[str] = []
    memory: str | None = None
    memory_chars: Span | None = None
    action: Action | None = None
    argument: str | None = None
    valid = not _CHAT_MARKER.search(text)
    end = 0
    for block in _BLOCK.finditer(text):
        name, inside, close = block.groups()
        whole = bool(close) and not TAG.search(inside)
        valid = valid and whole and not text[end : block.start()].strip()
        end = block.end()
        order.append(name)
        if not whole:
            continue
        if name == "mem" and memory is None:
            memory, memory_chars = inside, block.span()
        elif name in ("search", "answer") and action is None:
            # A blank for each marker: taking one out must not join its neighbours into another.
            argument = _CHAT_MARKER.sub(" ", inside).strip() or None
            action = _action(name) if argument else None
    valid = valid and not text[end:].strip() and action is not None
    head = order[1:] if order[:1] == ["mem"] else order
    valid = valid and len(head) == 2 and head[0] == "think" and head[1] == action
    if require_memory and turn >= 2:
        valid = valid and memory is not None
    return ParsedTurn(valid, memory, action, argument, memory_chars)


def _action(name: str) -> Action:
    return "search" if name == "search" else "answer"


def token_span(offsets: Sequence[Span], chars: Span) -> Span:
    """Tokens ``[start, end)`` that overlap the characters ``chars``; both ends of ``offsets`` ascend."""
    first = bisect_right(offsets, chars[0], key=lambda offset: offset[1])
    last = bisect_left(offsets, chars[1], key=lambda offset: offset[0])
    return first, max(first, last)


def spans_from_marks(marks: Sequence[int]) -> list[Span]:
    """Spans from the published 0/1/2 marks: 1 = first token, 2 = last token, inclusive.

    One start too many is a segment that was cut off: the last start is dropped. Raises ``ValueError`` on any other
    mismatch.
    """
    starts = [i for i, mark in enumerate(marks) if mark == 1]
    ends = [i for i, mark in enumerate(marks) if mark == 2]
    if len(starts) == len(ends) + 1:
        starts.pop()
    spans = [(start, end + 1) for start, end in zip(starts, ends, strict=False)]
    edges = [edge for span in spans for edge in span]
    if len(starts) != len(ends) or any(start >= end for start, end in spans) or edges != sorted(edges):
        raise ValueError(f"marks do not pair up: starts at {starts}, ends at {ends}")
    return spans


_PIECES: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()  # text of single tokens, for speed alone


def token_offsets(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[Span]]:
    """The text of ``ids`` and, for each token, the characters it has a part in. Both ends ascend.

    Tokens that share one character (bytes of a Chinese letter, of an emoji) all get that character. A token that
    follows bytes which never became a character counts their replacement marks as well.
    """
    pieces = _PIECES.setdefault(tokenizer, {})
    for token_id in ids:
        if token_id not in pieces:
            pieces[token_id] = _decode(tokenizer, [token_id])
    text = _decode(tokenizer, ids)
    parts = [pieces[token_id] for token_id in ids]
    if _BROKEN in text or "".join(parts) != text:
        return _windowed_offsets(tokenizer, ids)
    offsets, start = [], 0
    for part in parts:
        offsets.append((start, start + len(part)))
        start += len(part)
    return text, offsets


def _windowed_offsets(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[Span]]:
    """``token_offsets`` where single tokens are no text: each is decoded together with the few tokens before it.

    The window before it begins and ends between two characters; it is there because decoders treat the first token of a
    text apart. So a decode stays as short as a character.
    """
    parts: list[str] = []
    offsets: list[Span] = []
    before = 0  # characters of ids[:clean]
    window, clean, context = 0, 0, 0  # ids[window:clean] is the window, of `context` characters
    start = 0
    fresh = ""
    for i in range(len(ids)):
        fresh = _decode(tokenizer, ids[window : i + 1])[context:]
        whole = before + len(fresh.rstrip(_BROKEN))
        partial = fresh.endswith(_BROKEN)
        offsets.append((start, whole + partial))
        start = whole  # the next token may still complete the character that begins here
        if not partial:
            parts.append(fresh)
            before, fresh = whole, ""
            window, clean = clean, i + 1
            context = len(_decode(tokenizer, ids[window:clean]))
    return "".join(parts) + fresh, offsets


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

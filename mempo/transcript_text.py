"""One long text of prompt, model and tool cut into turns: the transcripts of Search-R1 and its like.

Who wrote what is read from the tags alone, for the text has nothing else. The rule: what may be the tool's is never the
model's. Search-R1 (arXiv 2503.09516) stops the model at ``</search>`` and puts ``<information>`` there, so an
observation begins at an ``<information>`` right after a ``</search>`` and reaches to the last ``</information>`` before
the next such beginning: a passage that closes the tag itself, or holds tags of its own, gains no say. An
``<information>`` anywhere else was written by the model: it stays in its turn, which it makes ill-formed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Dialect = Literal["search-r1", "mem1"]

_MARK = r"<[|｜][^<>|｜\s]{1,40}[|｜]>"
_MARKS = rf"(?:{_MARK}\s*)*"  # of a chat template: ends of messages, headers
_HEADER = re.compile(rf"(?:{_MARK}|<start_of_turn>)(?:assistant|model)(?:{_MARK})?\s*")
_ASKED = re.compile(r"Question:[^\n]*(?:\n|\Z)")
_ENDS = re.compile(rf"{_MARK}|<end_of_turn>|</s>")
_QUESTION_ENDS = re.compile(rf"{_ENDS.pattern}|\n(?:assistant|model)\s*\Z")  # a header decoded without its marks
_ASSISTANT = re.compile(rf"\s*{_MARKS}(?:assistant[ \t]*(?:\n|(?=<[|｜])|\Z)\s*{_MARKS})?")
_TAG = re.compile(r"<(/?)(\w+)>")
_OWN_TAG = re.compile(r"\s*<(?:think|search|answer|mem|IS|query)>")
# What Search-R1's environment tells a model that neither searched nor answered.
_NOTICE = re.compile(r"My previous action is invalid\. If I want to search, [^\n]{0,300}? Let me try again\.")


@dataclass(frozen=True, slots=True)
class Tags:
    """``search`` and ``information``: how a dialect calls these two; ``renamed``: its tags -> ours."""

    search: str = "search"
    information: str = "information"
    renamed: Mapping[str, str] = field(default_factory=dict)


# The names of MEM1's paper (arXiv 2506.15841): an internal state, a query, info. Its code uses Search-R1's.
DIALECTS: dict[Dialect, Tags] = {
    "search-r1": Tags(),
    "mem1": Tags("query", "info", {"IS": "mem", "query": "search", "info": "information"}),
}


@dataclass(frozen=True, slots=True)
class Said:
    """A turn: what the model wrote, and what it was told, None where nothing came back."""

    response: str
    observation: str | None = None


def split_prompt(text: str) -> tuple[str, str]:
    """(prompt, what came after it). The prompt ends with the first assistant header of a chat template; without one,
    with the first line that says ``Question:``. A text that begins with a tag of the model's has no prompt.

    Raises ``ValueError`` where none of these is there.

    >>> split_prompt("Write <answer> Bonn </answer>. Question: where?\\n<think>a</think>")
    ('Write <answer> Bonn </answer>. Question: where?\\n', '<think>a</think>')
    """
    if _OWN_TAG.match(text):
        return "", text
    end = _HEADER.search(text) or _ASKED.search(text)
    if end is None:
        raise ValueError("where the prompt ends is not seen: no assistant header, no line with 'Question:'")
    return text[: end.end()], text[end.end() :]


def asked_question(prompt: str) -> str:
    """What follows the last ``Question:`` of a prompt, up to the next mark of a chat template; empty without one."""
    _, said, asked = prompt.rpartition("Question:")
    return _QUESTION_ENDS.split(asked, maxsplit=1)[0].strip() if said else ""


def split_turns(text: str, dialect: Dialect = "search-r1") -> list[Said]:
    """The turns of what came after a prompt, at least one, in time proportional to its length.

    An observation without its end reaches to the end of the text. Search-R1's notice of an invalid action is an
    observation too. White space and marks of a chat template around both belong to nobody.

    >>> split_turns("<search>Ulm</search>\\n\\n<information>a </information> b</information>\\n\\n<answer>c</answer>")
    [Said(response='<search>Ulm</search>', observation='a </information> b'), Said(response='<answer>c</answer>', observation=None)]
    """  # noqa: E501
    names = DIALECTS[dialect]
    begin = re.compile(rf"(?<=</{names.search}>)\s*{_MARKS}(?:(?:user|tool|ipython)\s*{_MARKS})?<{names.information}>")
    close = f"</{names.information}>"
    begins = [match.span() for match in begin.finditer(text)]
    notices = [match.span() for match in _NOTICE.finditer(text)]
    turns: list[Said] = []
    at = _frame_end(text, 0)
    for start, end in sorted(begins + notices):
        if start < at:  # inside an observation
            continue
        seen, after = (start, end), end
        if text.endswith(f"<{names.information}>", start, end):
            last = _last(text, close, end, begins)
            seen, after = (end, last), last + len(close)
        turns.append(Said(own_words(text[at:start], dialect), text[slice(*seen)].strip()))
        at = _frame_end(text, after)
    rest = own_words(text[at:], dialect)
    return [*turns, Said(rest)] if rest or not turns else turns


def own_words(text: str, dialect: Dialect = "search-r1") -> str:
    """A response with the dialect's tags as ours, without white space around it and without the marks of a chat
    template, padding too, that it ends with.

    >>> own_words(" <query>Ulm</query> <|im_end|>\\n<|endoftext|><|endoftext|>", "mem1")
    '<search>Ulm</search>'
    """
    end = len(text)
    for mark in reversed(list(_ENDS.finditer(text))):
        if text[mark.end() : end].strip():
            break
        end = mark.start()
    renamed = DIALECTS[dialect].renamed
    return _TAG.sub(lambda tag: f"<{tag[1]}{renamed.get(tag[2], tag[2])}>", text[:end].strip())


def unwrapped(text: str, dialect: Dialect = "search-r1") -> str:
    """A message of the tool without the tag that is around all of it."""
    name = DIALECTS[dialect].information
    text = text.strip()
    return text.removeprefix(f"<{name}>").removesuffix(f"</{name}>").strip()


def _last(text: str, close: str, at: int, begins: Sequence[tuple[int, int]]) -> int:
    """Where the observation that begins at ``at`` ends: at the last ``close`` before the next beginning after one."""
    first = text.find(close, at)
    if first < 0:
        return len(text)
    following = bisect_left(begins, (first, 0))
    return text.rfind(close, first, begins[following][0] if following < len(begins) else len(text))


def _frame_end(text: str, at: int) -> int:
    match = _ASSISTANT.match(text, at)
    return match.end() if match else at

"""Rows of others' dumps (docs/transcripts.md) as transcripts in texts: whatever they call their columns.

A row has golden answers as datasets write them down (``data.ground_truth``) and one of three forms of a transcript.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from mempo.data.columns import Id, distinct
from mempo.data.ground_truth import gold_list
from mempo.transcript_file import validated
from mempo.transcript_text import Dialect, Said, asked_question, own_words, split_prompt, split_turns, unwrapped
from mempo.transcripts import MAX_TEXT, MAX_TURNS, Text, TextTranscript

COLUMNS = ("id", "sample_index", "question", "golden_answers", "ground_truth", "gts", "reward_model", "sequences_str",
           "prompt", "input", "response", "output", "messages", "score", "reward")  # fmt: skip


def _objectives(value: Any) -> Any:
    """A list of aliases an objective: one, unless the answers are themselves lists."""
    golds = gold_list(value)
    several = isinstance(golds, list) and any(isinstance(entry, list) for entry in golds)
    return [gold_list(entry) for entry in golds] if several else [golds]


Aliases = Annotated[list[Text], AfterValidator(distinct)]


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Message(_Lenient):
    """``tool_calls``: an action that is in no text cannot be read."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    tool_calls: Annotated[list[Any], Field(max_length=0)] = []


Messages = Annotated[list[Message], Field(min_length=1, max_length=2 * MAX_TURNS + 2)]


class Dump(_Lenient):
    """One row. ``score``: what its owner gave it."""

    id: Id | None = None
    sample_index: int | None = None
    question: Text | None = None
    golden_answers: Annotated[list[Aliases], BeforeValidator(_objectives)] = Field(
        validation_alias=AliasChoices(
            "golden_answers", "ground_truth", "gts", AliasPath("reward_model", "ground_truth")
        )
    )
    sequences_str: Annotated[str, Field(max_length=4 * MAX_TEXT)] | None = None
    prompt: Annotated[Messages, BeforeValidator(_as_messages)] | None = Field(
        None, validation_alias=AliasChoices("prompt", "input")
    )
    response: Annotated[str, Field(max_length=4 * MAX_TEXT)] | None = Field(
        None, validation_alias=AliasChoices("response", "output")
    )
    messages: Messages | None = None
    score: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None, validation_alias=AliasChoices("score", "reward")
    )


class Imported(TextTranscript):
    """``reported``: the score that the file had for it."""

    reported: float | None = None


def reader(dialect: Dialect) -> Callable[[dict[str, Any]], Imported]:
    """What reads a row; it raises ``ValueError`` naming the field."""

    def read(row: dict[str, Any]) -> Imported:
        dump = validated(Dump, row)
        prompt, said = _told(dump, dialect)
        question = dump.question or asked_question(prompt)
        if not question.strip():
            raise ValueError("question: missing, and no prompt with 'Question:'")
        values = {
            "id": _id_of(question, dump.golden_answers) if dump.id is None else dump.id,
            "sample_index": dump.sample_index,
            "question": question,
            "golden_answers": dump.golden_answers,
            "turns": [{"response": turn.response, "observation": turn.observation} for turn in said],
            "reported": dump.score,
        }
        return validated(Imported, values)

    return read


def _id_of(question: str, golden_answers: list[list[str]]) -> str:
    """Rows of one question and its answers are samples of it."""
    return hashlib.sha256(repr((question, golden_answers)).encode()).hexdigest()[:12]


def _told(dump: Dump, dialect: Dialect) -> tuple[str, list[Said]]:
    """The prompt and the turns, of the one form that is there."""
    forms = [name for name in ("sequences_str", "response", "messages") if getattr(dump, name) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) or "none of them"
        raise ValueError(f"a record has sequences_str, or response (output), or messages; here: {found}")
    if dump.messages is not None:
        return _from_messages(dump.messages, dialect)
    if dump.response is not None:
        return _asked(dump.prompt or []), split_turns(dump.response, dialect)
    try:
        prompt, rest = split_prompt(dump.sequences_str or "")
    except ValueError as error:
        raise ValueError(f"sequences_str: {error}") from None
    return prompt, split_turns(rest, dialect)


def _asked(messages: list[Message]) -> str:
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


def _from_messages(messages: list[Message], dialect: Dialect) -> tuple[str, list[Said]]:
    """A turn an assistant message, and what follows it is its observation: roles say who wrote what. A single one is
    cut at its tags, like any text.
    """
    places = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not places or places[0] == 0:
        raise ValueError("messages: expected a user message and then an assistant message")
    turns: list[Said] = []
    for place, end in pairwise([*places, len(messages)]):
        seen = "\n".join(message.content for message in messages[place + 1 : end])
        if end < len(messages) and end == place + 1:
            raise ValueError(f"messages[{end}]: an assistant message right after another")
        text = messages[place].content
        said = split_turns(text, dialect) if len(places) == 1 else [Said(own_words(text, dialect))]
        if end > place + 1:
            if said[-1].observation is not None:
                raise ValueError(f"messages[{place + 1}]: a message after an observation")
            said[-1] = Said(said[-1].response, unwrapped(seen, dialect))
        turns += said
    return _asked(messages[: places[0]]), turns

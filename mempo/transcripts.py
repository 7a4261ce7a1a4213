"""The three forms in which anyone may hand over a trajectory (docs/score.md): texts, chat messages, token ids.

Everything in such a record is hostile until it has passed here: types are strict, sizes have limits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mempo import tags
from mempo.records import Question

MAX_TEXT = 10**6  # characters of a text, and tokens of a list
MAX_TURNS = 256


def _aliases(value: Any) -> list[list[str]]:
    """A string, a list of strings (one an objective) or a list of lists of aliases, as lists of aliases."""
    objectives = [value] if isinstance(value, str) else value
    if not isinstance(objectives, list) or not all(_is_objective(entry) for entry in objectives):
        raise ValueError("expected a string, a list of strings (one an objective) or a list of lists of aliases")
    try:
        return Question("", "", objectives).golden_answers
    except ValueError as error:
        raise ValueError(str(error).partition(": ")[2]) from None


def _is_objective(entry: Any) -> bool:
    return isinstance(entry, str) or (isinstance(entry, list) and all(isinstance(alias, str) for alias in entry))


Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TEXT)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Transcript(_Strict):
    """What every form has. Other keys of a row are left alone: they are somebody's notes."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, Field(min_length=1, max_length=1000)]
    question: Annotated[Text, Field(min_length=1)]
    golden_answers: Annotated[list[list[Text]], BeforeValidator(_aliases)]
    sample_index: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class TextTurn(_Strict):
    response: Text
    observation: Text | None = None


class TextTranscript(_Transcript):
    """Texts as the model and the tool wrote them; prompts come from ``mempo.prompts``."""

    turns: Annotated[list[TextTurn], Field(min_length=1, max_length=MAX_TURNS)]

    @model_validator(mode="after")
    def _observed(self) -> TextTranscript:
        for index, turn in enumerate(self.turns[:-1]):
            if turn.observation is None:
                raise ValueError(f"turns[{index}].observation: missing, and another turn follows")
        return self


class Message(_Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class ChatTranscript(_Transcript):
    """Chat messages; each assistant message is a turn, what follows it is its observation."""

    messages: Annotated[list[Message], Field(min_length=2, max_length=2 * MAX_TURNS + 2)]

    @model_validator(mode="after")
    def _turns_apart(self) -> ChatTranscript:
        places = self.places()
        if not places or places[0] == 0:
            raise ValueError("messages: expected a user message and then an assistant message")
        for before, place in pairwise(places):
            if place == before + 1:
                raise ValueError(f"messages[{place}]: an assistant message right after another")
        return self

    def places(self) -> list[int]:
        """Indices of the assistant messages."""
        return [index for index, message in enumerate(self.messages) if message.role == "assistant"]


class TokenTurn(_Strict):
    """``marks``: the published 0/1/2 of each response token (``tags.spans_from_marks``)."""

    response_ids: TokenIds
    observation_ids: TokenIds | None = None
    marks: list[Literal[0, 1, 2]] | None = None

    @model_validator(mode="after")
    def _marks_fit(self) -> TokenTurn:
        if self.marks is not None:
            if len(self.marks) != len(self.response_ids):
                raise ValueError(f"{len(self.marks)} marks for {len(self.response_ids)} response_ids")
            tags.spans_from_marks(self.marks)
        return self


class TokenTranscript(_Transcript):
    """Token ids; ``observation_ids`` are all that stands between a response and the next generation."""

    prompt_ids: Annotated[TokenIds, Field(min_length=1)]
    turns: Annotated[list[TokenTurn], Field(min_length=1, max_length=MAX_TURNS)]

    @model_validator(mode="after")
    def _observed(self) -> TokenTranscript:
        for index, turn in enumerate(self.turns[:-1]):
            if turn.observation_ids is None:
                raise ValueError(f"turns[{index}].observation_ids: missing, and another turn follows")
        return self


Transcript: TypeAlias = TextTranscript | ChatTranscript | TokenTranscript

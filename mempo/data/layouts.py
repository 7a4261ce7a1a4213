"""The rows of published question sets, each layout as a model of its columns, and what they become: an ``Example``.

A row that lacks something, or holds something else in its place, raises ``ValueError``. Columns that are not asked
for are not looked at, but in our own layout, ``jsonl``, where they are refused.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from mempo.choices import Layout
from mempo.data.columns import Aliases, Context, Facts, Golds, Id, Plain, Supported, Text, distinct


@dataclass(frozen=True, slots=True)
class Paragraph:
    title: str
    text: str
    gold: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A question as its dataset has it. ``row_id`` is empty where the row has none; ``source``: its dataset's name."""

    row_id: str
    question: str
    golden_answers: list[str]
    paragraphs: list[Paragraph]
    source: str = ""


def read_example(layout: Layout, row: Any) -> Example:
    """Raises ``ValueError`` with the first thing that is wrong, in words that rows with the same fault share."""
    try:
        example: Example = LAYOUTS[layout].model_validate(row).example()
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"] if not isinstance(part, int))
        raise ValueError(f"{place}: {problem['msg']}".removeprefix(": ").replace("Value error, ", "")) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return example


def columns_of(layout: Layout) -> list[str]:
    names: list[str] = []
    for name, field in LAYOUTS[layout].model_fields.items():
        choices = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name]
        names += [str(choice) for choice in choices]
    return names


def _paragraph(title: str, text: str, gold: bool) -> Paragraph:
    # HotpotQA's titles stand as in the dump of Wikipedia, with &quot; and &amp;.
    return Paragraph(" ".join(html.unescape(title).split()), text.strip(), gold)


class Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class HotpotRow(Row):
    """HotpotQA and 2WikiMultihopQA. Rows without ``context`` exist; a fact may point past the last sentence."""

    id: Id = Field("", validation_alias=AliasChoices("_id", "id"))
    question: Text
    answer: Golds
    context: Context = []
    supporting_facts: Facts = []

    def example(self) -> Example:
        gold = {html.unescape(title) for title, _ in self.supporting_facts}
        paragraphs = [
            _paragraph(title, " ".join(filter(None, map(str.strip, sentences))), html.unescape(title) in gold)
            for title, sentences in self.context
        ]
        return Example(self.id, self.question, self.answer, paragraphs)


class MusiqueRow(Row):
    id: Id
    question: Text
    answer: Golds
    answer_aliases: list[Plain] = []
    answerable: bool = True
    paragraphs: Supported

    def example(self) -> Example:
        if not self.answerable:
            raise ValueError("answerable: false")
        paragraphs = [_paragraph(*paragraph) for paragraph in self.paragraphs]
        return Example(self.id, self.question, distinct([*self.answer, *self.answer_aliases]), paragraphs)


class FlashragRow(Row):
    id: Id
    question: Text
    golden_answers: Golds

    def example(self) -> Example:
        return Example(self.id, self.question, self.golden_answers, [])


class Message(Row):
    role: str
    content: Plain


class RewardModel(Row):
    ground_truth: Golds


class VerlRow(Row):
    """Search-R1, DeepResearcher, Tool-Star: the question stands in ``question``, or after a prompt's ``Question:``."""

    id: Id | None = None
    question: Text | None = None
    prompt: list[Message] = []
    reward_model: RewardModel
    data_source: Plain | None = None

    def example(self) -> Example:
        asked = [message.content for message in self.prompt if message.role == "user"]
        question = self.question or (asked[-1].rpartition("Question:")[2].strip() if asked else "")
        if not question:
            raise ValueError("question: neither in question nor in prompt")
        return Example(self.id or "", question, self.reward_model.ground_truth, [], self.data_source or "")


class OwnParagraph(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    title: Plain
    text: Plain
    gold: bool = False


class OwnRow(BaseModel):
    """``{"id", "question", "golden_answers": [aliases], "paragraphs": [{"title", "text", "gold"}], "source"}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: Id
    question: Text
    golden_answers: Aliases
    paragraphs: list[OwnParagraph] = []
    source: Plain = ""

    def example(self) -> Example:
        paragraphs = [_paragraph(p.title, p.text, p.gold) for p in self.paragraphs]
        return Example(self.id, self.question, self.golden_answers, paragraphs, self.source)


LAYOUTS: dict[Layout, Any] = {
    "hotpotqa": HotpotRow,
    "2wiki": HotpotRow,
    "musique": MusiqueRow,
    "flashrag": FlashragRow,
    "verl": VerlRow,
    "jsonl": OwnRow,
}

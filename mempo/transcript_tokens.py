"""Checked transcripts become Questions and Trajectories in a tokenizer's ids, as if a rollout had written them.

Text is data: a chat marker in it is plain characters. Only in what the model wrote are the protocol's tags the tokens
that its vocabulary has for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mempo import tags
from mempo.config import Config
from mempo.probes import make_probe
from mempo.prompts import ChatFrame, chat_frame, context, encode_frame, encode_text
from mempo.records import Question, Trajectory, Turn
from mempo.transcript_file import Attempt, Problems
from mempo.transcripts import ChatTranscript, TextTranscript, TokenTranscript, Transcript
from mempo.turns import read_turn

_WRAPPED = re.compile(r"<information>\n(.*)\n</information>", re.DOTALL)
_SLOT = "\u2043slot{}\u2043"  # stands where a message's text goes while the template is rendered


@dataclass(frozen=True, slots=True)
class _Said:
    """One turn in token ids; ``marks`` where the record brought its own."""

    response_ids: list[int]
    observation_ids: list[int]
    observation: str | None = None
    marks: Sequence[int] | None = None


def tokenised(
    attempts: Sequence[Attempt], tokenizer: Any, config: Config, path: Path
) -> tuple[list[Trajectory], dict[str, Question]]:
    """A Trajectory for each attempt, of policy version 0, and the questions by id.

    Raises ``ValueError`` naming the first rows of ``path`` that the tokenizer or its chat template cannot carry.
    """
    problems, trajectories = Problems(path), []
    questions: dict[str, Question] = {}
    firsts: dict[str, tuple[int, list[int]]] = {}
    writer = _Writer(tokenizer, config)
    for attempt in attempts:
        record = attempt.record
        try:
            if record.id not in questions:
                question = Question(record.id, record.question, record.golden_answers)
                make_probe(tokenizer, question)
                questions[record.id] = question
            first, said = writer.ids_of(record)
            row, same = firsts.setdefault(record.id, (attempt.row, first))
            if first != same:
                raise ValueError(f"another first prompt than in {row}, which has the same id {record.id!r}")
            trajectories.append(writer.trajectory(attempt, first, said))
        except ValueError as error:
            problems.add(attempt.row, str(error))
    problems.stop()
    return trajectories, questions


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """Token ids of what a model wrote: the protocol's tags as their own tokens where it has them, the rest as text."""
    added = tokenizer.get_added_vocab()
    pieces = re.split(f"({tags.TAG.pattern})", text) if any(map(tags.TAG.fullmatch, added)) else [text]
    ids: list[int] = []
    for piece in pieces:
        own = piece in added and tags.TAG.fullmatch(piece)
        ids += [added[piece]] if own else encode_text(tokenizer, piece)
    return ids


class _Writer:
    def __init__(self, tokenizer: Any, config: Config) -> None:
        self.tokenizer, self.config = tokenizer, config
        self._frame: ChatFrame | None = None

    def ids_of(self, record: Transcript) -> tuple[list[int], list[_Said]]:
        """The first prompt, and each turn's ids."""
        if isinstance(record, TextTranscript):
            return self._from_text(record)
        if isinstance(record, ChatTranscript):
            return self._from_chat(record)
        return self._from_tokens(record)

    def trajectory(self, attempt: Attempt, first: list[int], said: Sequence[_Said]) -> Trajectory:
        turns: list[Turn] = []
        rollout = self.config.rollout
        for one in said:
            turns.append(self._turn(context(rollout.context, first, turns, rollout.recent_turns), one, len(turns) + 1))
        answer = turns[-1].argument if turns[-1].action == "answer" else None
        return Trajectory(
            question_id=attempt.record.id,
            sample_index=attempt.sample_index,
            policy_version=0,
            turns=turns,
            answer=answer,
            status="no_action" if answer is None else "answered",
        )

    def _turn(self, prompt_ids: list[int], said: _Said, number: int) -> Turn:
        turn = read_turn(
            self.tokenizer, prompt_ids, said.response_ids, number, require_memory=self.config.format.require_memory
        )
        if said.marks is not None:
            turn = replace(turn, mem_span=next(iter(tags.spans_from_marks(said.marks)), None))
        return replace(turn, observation=said.observation, observation_ids=said.observation_ids)

    def _from_text(self, record: TextTranscript) -> tuple[list[int], list[_Said]]:
        frame = self._frame = self._frame or chat_frame(self.tokenizer, self.config.system)
        said = []
        for turn in record.turns:
            ids, seen = encode_response(self.tokenizer, turn.response), turn.observation
            after = [] if seen is None else frame.observation(encode_text(self.tokenizer, seen), ids)
            said.append(_Said(ids, after, seen))
        return frame.first_prompt(encode_text(self.tokenizer, record.question)), said

    def _from_chat(self, record: ChatTranscript) -> tuple[list[int], list[_Said]]:
        places = record.places()
        said = []
        for place, end in pairwise([*places, len(record.messages)]):
            ids = encode_response(self.tokenizer, record.messages[place].content)
            after = list(self._rendered(record, place + 1, end)) if end > place + 1 else []
            said.append(_Said(ids, after, record.messages[place + 1].content if after else None))
        return list(self._rendered(record, 0, places[0])), said

    def _rendered(self, record: ChatTranscript, start: int, end: int) -> Iterator[int]:
        """Tokens of messages ``start`` to ``end``, the frame before and after them included, up to the next answer.

        The template sees marks instead of texts, so no text can act on it and no earlier turn is rewritten by it.
        """
        inner, shown = [], []
        for index, message in enumerate(record.messages[:end]):
            # A tool's text that comes in the protocol's own wrapper keeps it as part of the frame.
            wrapped = message.role in ("user", "tool") and _WRAPPED.fullmatch(message.content)
            slot = _SLOT.format(index)
            inner.append(wrapped[1] if wrapped else message.content)
            content = f"<information>\n{slot}\n</information>" if wrapped else slot
            shown.append({"role": message.role, "content": content})
        pieces = self._pieces(shown)
        for index in range(start, end):
            yield from encode_frame(self.tokenizer, pieces[index])
            yield from encode_text(self.tokenizer, inner[index])
        yield from encode_frame(self.tokenizer, pieces[end])

    def _pieces(self, shown: list[dict[str, str]]) -> list[str]:
        """What the template writes before, between and after the texts of the messages."""
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from None
        parts = re.split(_SLOT.format(r"(\d+)"), text)
        if parts[1::2] != [str(index) for index in range(len(shown))]:
            raise ValueError("messages: the model's chat template leaves some out, repeats or moves them")
        return list(parts[::2])

    def _from_tokens(self, record: TokenTranscript) -> tuple[list[int], list[_Said]]:
        self._in_vocabulary("prompt_ids", record.prompt_ids)
        said = []
        for index, turn in enumerate(record.turns):
            self._in_vocabulary(f"turns[{index}].response_ids", turn.response_ids)
            self._in_vocabulary(f"turns[{index}].observation_ids", turn.observation_ids or [])
            said.append(_Said(turn.response_ids, turn.observation_ids or [], None, turn.marks))
        return record.prompt_ids, said

    def _in_vocabulary(self, name: str, ids: Sequence[int]) -> None:
        size = len(self.tokenizer)
        if ids and max(ids) >= size:
            raise ValueError(f"{name}: {max(ids)} is no token of the model, which has {size}")

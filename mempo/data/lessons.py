"""Demonstrations as training samples, in exactly the token ids that a rollout makes of the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any, get_args

from mempo.config import Config, Context
from mempo.data.compose import MIX_RELATIONS, draw_pattern, numbered, question_text
from mempo.data.demos import Dealer, Step, known_answers, play
from mempo.data.geo import Relation, World, shuffled
from mempo.prompts import PROBE_HEAD, PROBE_TAIL, ChatFrame, chat_frame, context, encode_frame, encode_text
from mempo.records import Sample, Turn
from mempo.search import render

Piece = tuple[list[int], bool]  # token ids, and whether they are learnt


class Teacher:
    """The course: ``lessons(step)`` depends on the seed and on ``step`` alone, so a killed warm start can go on."""

    def __init__(self, tokenizer: Any, world: World, config: Config) -> None:
        self.tokenizer, self.world, self.config = tokenizer, world, config
        self.frames: dict[Context, ChatFrame] = {
            "memory": chat_frame(tokenizer, config.prompt.system),
            "full": chat_frame(tokenizer, config.prompt.system_full),
            "think": chat_frame(tokenizer, config.prompt.system_think),
        }
        self.short = lru_cache(maxsize=None)(
            lambda name: len(encode_text(tokenizer, name)) <= config.data.max_name_tokens
        )

    def lessons(self, step: int) -> list[Sample]:
        """The ``batch_size`` samples of one optimiser step; the weights of all their loss tokens add up to 1.

        A policy from scratch first copies for ``copy_steps`` steps: demonstrations teach that far more slowly.
        """
        random = Random(f"{self.config.warmstart.seed}/{step}")
        size = self.config.warmstart.batch_size
        if self.config.model.path is None and step < self.config.warmstart.copy_steps:
            return weighted([copy_lesson(len(self.tokenizer), random) for _ in range(size)])
        samples: list[Sample] = []
        while len(samples) < size:
            samples += self._world_lessons(random)
        return weighted(samples[:size])

    def _world_lessons(self, random: Random) -> list[Sample]:
        """The lessons of ``reshuffle_every`` questions in one shuffled world."""
        rates, data = self.config.warmstart, self.config.data
        relations = frozenset(get_args(Relation)) if data.mix == "general" else MIX_RELATIONS
        dealer = Dealer(shuffled(self.world, random, self.short), relations, random)
        samples: list[Sample] = []
        for _ in range(rates.reshuffle_every):
            objectives = numbered(dealer.objectives(draw_pattern(data, random)), data, random)
            rule = self._rule(random.random())
            steps = play(dealer.world, objectives, rates, random, rule=rule)
            turns = self.turns(rule, question_text(objectives), dealer.world, steps)
            samples += [full_lesson(turns)] if rule == "full" else memory_lessons(turns)
            if rule == "memory":
                samples += self._probe_lessons(turns, steps, len(objectives), random)
        return samples

    def _rule(self, drawn: float) -> Context:
        """Whose lesson it is, by a number between 0 and 1."""
        full = self.config.warmstart.full_context_share
        return "full" if drawn < full else "think" if drawn < full + self.config.warmstart.think_share else "memory"

    def turns(self, rule: Context, question: str, world: World, steps: Sequence[Step]) -> list[Turn]:
        frame = self.frames[rule]
        first = frame.first_prompt(encode_text(self.tokenizer, question))
        turns: list[Turn] = []
        for step in steps:
            ids = encode_frame(self.tokenizer, step.text)
            seen = render([world[step.argument].document]) if step.action == "search" else None
            after = [] if seen is None else frame.observation(encode_text(self.tokenizer, seen), ids)
            turns.append(
                Turn(
                    prompt_ids=context(rule, first, turns),
                    response_ids=ids,
                    sampling_logprobs=[0.0] * len(ids),
                    text=step.text,
                    valid=True,
                    memory=step.segment[5:-6] or None,
                    mem_span=(0, len(encode_frame(self.tokenizer, step.segment))) if step.segment else None,
                    action=step.action,
                    argument=step.argument,
                    observation=seen,
                    observation_ids=after,
                    finish_reason="stop",
                )
            )
        return turns

    def _probe_lessons(
        self, turns: Sequence[Turn], steps: Sequence[Step], num_objectives: int, random: Random
    ) -> Iterator[Sample]:
        """Now and then, what a turn's memory knows, or what the whole history before it has shown."""
        rate = self.config.warmstart.probe_share
        for index in range(1, len(turns)):
            if random.random() >= rate / (1 - rate):
                continue
            first, (start, end) = turns[0].prompt_ids, turns[index].mem_span or (0, 0)
            if random.random() < 0.5:
                before, items = first + turns[index].response_ids[start:end], steps[index].memory
            else:
                before, items = context("full", first, turns[:index]), steps[index].seen
            gold = encode_text(self.tokenizer, known_answers(items, num_objectives))
            head, tail = encode_frame(self.tokenizer, PROBE_HEAD), encode_frame(self.tokenizer, PROBE_TAIL)
            yield lesson([(before + head, False), (gold + tail[:1], True), (tail[1:], False)])


def memory_lessons(turns: Sequence[Turn]) -> list[Sample]:
    """One lesson a turn; the first turn is learnt inside the second's prompt, where the same tokens stand before it."""
    lessons = [full_lesson(turns[:2])]
    lessons += [lesson([(turn.prompt_ids, False), (turn.response_ids, True)]) for turn in turns[2:]]
    return lessons


def full_lesson(turns: Sequence[Turn]) -> Sample:
    pieces: list[Piece] = [(turns[0].prompt_ids, False)]
    for turn in turns[:-1]:
        pieces += [(turn.response_ids, True), (turn.observation_ids, False)]
    return lesson([*pieces, (turns[-1].response_ids, True)])


def copy_lesson(vocab_size: int, random: Random, num_keys: int = 16, num_asked: int = 12) -> Sample:
    """Pairs of random tokens, then some of the keys again: each is to be followed by what followed it before."""
    ids = random.sample(range(vocab_size), 2 * num_keys)
    pieces: list[Piece] = [(ids, False)]
    for _ in range(num_asked):
        key = 2 * random.randrange(num_keys)
        pieces += [([ids[key]], False), ([ids[key + 1]], True)]
    return lesson(pieces)


def lesson(pieces: Sequence[Piece]) -> Sample:
    token_ids = [token for ids, _ in pieces for token in ids]
    zeros = [0.0] * len(token_ids)
    return Sample(
        key="lesson",
        token_ids=token_ids,
        loss_mask=[int(learnt) for ids, learnt in pieces for _ in ids],
        old_logprobs=zeros,
        ref_logprobs=zeros,
        outcome_advantage=0.0,
        memory_advantages=zeros,
        weight=1.0,
    )


def weighted(samples: Sequence[Sample]) -> list[Sample]:
    total = sum(sum(sample.loss_mask) for sample in samples)
    return [replace(sample, weight=1.0 / total) for sample in samples]

"""What the scoring pass asks a policy: the gold answer as a probe, after the history and after the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mempo import mem_reward, tags
from mempo.packing import TokenTree
from mempo.prompts import PROBE_HEAD, PROBE_TAIL, encode_frame, encode_text
from mempo.records import Question, Turn

Asked = tuple[Sequence[int], int]  # a probe's tokens, and how many of the last are targets
MAX_PROBES = 8  # wordings of one answer: each costs its tokens again in every context


@dataclass(frozen=True, slots=True)
class Probe:
    """The gold answer of one question as a final turn would give it: A tokens, and their character offsets in ``text``.

    ``gold_spans`` are the characters of each objective's answer; ``core_tokens`` counts the gold text encoded alone.
    ``scored`` of the last tokens are targets: what stands before them belongs to the answer by no rule.
    """

    text: str
    token_ids: list[int]
    offsets: list[tuple[int, int]]
    gold_spans: list[tuple[int, int]]
    core_tokens: int
    scored: int

    @property
    def asked(self) -> Asked:
        return self.token_ids, self.scored


def wordings(question: Question, aliases: str) -> list[Question]:
    """The question once for each wording of its answer that is scored: number i takes alias i of every objective.

    An objective with fewer takes its last; at most ``MAX_PROBES``, equal ones once; ``aliases`` ``first``: one.
    """
    golds = question.golden_answers
    count = 1 if aliases == "first" else min(MAX_PROBES, max(map(len, golds)))
    return [replace(question, golden_answers=[[g[min(i, len(g) - 1)]] for g in golds]) for i in range(count)]


def make_probe(tokenizer: Any, question: Question) -> Probe:
    """``PROBE_HEAD + mem_reward.gold_text + PROBE_TAIL``, tokenised once by itself.

    A gold text that spells a special token is encoded apart, as plain text. Raises ``ValueError`` where the tokenizer
    does not carry the text through.
    """
    gold = mem_reward.gold_text(question.golden_answers)
    text = PROBE_HEAD + gold + PROBE_TAIL
    core = encode_text(tokenizer, gold)
    if any(token in gold for token in tokenizer.get_added_vocab()):
        ids = [*encode_frame(tokenizer, PROBE_HEAD), *core, *encode_frame(tokenizer, PROBE_TAIL)]
    else:
        ids = encode_frame(tokenizer, text)
    decoded, offsets = tags.token_offsets(tokenizer, ids)
    if decoded != text:
        raise ValueError(f"question {question.question_id!r}: the tokenizer turns {text!r} into {decoded!r}")
    spans = mem_reward.gold_spans(question.golden_answers, len(PROBE_HEAD))
    starts, ends = zip(*offsets, strict=True)
    masks = mem_reward.answer_mask(starts, ends, spans), mem_reward.last_four_mask(len(ids), len(core))
    first = min((mask.index(1) for mask in masks if any(mask)), default=0)
    return Probe(text, ids, offsets, spans, len(core), len(ids) - first)


def segment_ids(tokenizer: Any, turn: Turn, number: int) -> list[int]:
    """The tokens of ``<mem>..</mem>`` as sampled; one that also holds characters outside gives way to its inside ones.

    A span from published marks that is not the text's is taken as it stands. ``number`` counts turns from 1. Empty
    where the turn has no segment.
    """
    if turn.mem_span is None:
        return []
    text, offsets = tags.token_offsets(tokenizer, turn.response_ids)
    inside = tags.parse_turn(turn.text, number).memory_chars
    if inside is None or tags.token_span(offsets, inside) != turn.mem_span:
        return turn.response_ids[slice(*turn.mem_span)]  # published marks: taken as they stand
    ids: list[int] = []
    for index in range(*turn.mem_span):
        start, end = offsets[index]
        if inside[0] <= start and end <= inside[1]:
            ids.append(turn.response_ids[index])
        else:
            ids += encode_text(tokenizer, text[max(start, inside[0]) : min(end, inside[1])])
    return ids


def full_tree(turns: Sequence[Turn], scored: Sequence[int], probes: Sequence[Asked], baseline: str) -> TokenTree:
    """One trajectory: its history once as the trunk, a copy of each probe before the generation of each scored turn.

    ``history``: the probes follow every token before the turn, the turn's own output left out. ``seen``: they follow
    the turn's own ``prompt_ids``. ``scored`` are rising indices into ``turns``. Targets: turn by turn, probe by probe.
    """
    first = turns[0].prompt_ids
    tree = TokenTree()
    root = trunk = tree.add(first)
    done = 0
    for index in scored:
        if baseline == "history":
            for turn in turns[done:index]:
                trunk = tree.add([*turn.response_ids, *turn.observation_ids], parent=trunk)
            done, branch = index, trunk
        else:
            branch = tree.add(turns[index].prompt_ids[len(first) :], parent=root)
        _ask(tree, branch, probes)
    return tree


def memory_tree(
    first_prompt: Sequence[int], branches: Sequence[Sequence[Sequence[int]]], probes: Sequence[Asked]
) -> TokenTree:
    """One question: its first prompt once, a branch for each memory.

    A branch is a segment and the observations that look-ahead lets follow it; after each of these pieces stands a copy
    of each probe. Targets: branch by branch, piece by piece, probe by probe.
    """
    tree = TokenTree()
    root = tree.add(first_prompt)
    for pieces in branches:
        end = root
        for piece in pieces:
            end = tree.add(piece, parent=end)
            _ask(tree, end, probes)
    return tree


def _ask(tree: TokenTree, parent: int, probes: Sequence[Asked]) -> None:
    for token_ids, scored in probes:
        frame = len(token_ids) - scored
        tree.add(token_ids[frame:], parent=tree.add(token_ids[:frame], parent=parent), target=True)

"""Questions of several objectives from single ones, as MEM1 joins them, and splits that share none.

MEM1 (arXiv 2506.15841, ``gen_data/data_process`` in its repository) ends each question with "?" and joins them by "; ";
the answers come back in the same order, joined by "; ".
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from random import Random

from mempo.config import Data
from mempo.data.reading import Entry, Rejected
from mempo.rewards import holds_separator
from mempo.sources import QuestionFile, Split

# What two splits could ask is asked in the first of these: so dev can be drawn from the file that train is made of.
PRECEDENCE = ("test", "dev", "train")

Objectives = list[Entry]


def question_text(questions: Sequence[str]) -> str:
    """
    >>> question_text(["who was first", "Who was last?"])
    'who was first?; Who was last?'
    """
    if len(questions) == 1:
        return questions[0]
    return "; ".join(question if question.endswith(("?", "？")) else f"{question}?" for question in questions)


def splits(
    data: Data, read: Mapping[QuestionFile, Sequence[Entry]]
) -> tuple[dict[str, list[Objectives]], dict[str, list[Rejected]]]:
    """The questions of each split, and the rows left out of it though they can be read, with the reason.

    No row is asked twice, in a split or in two: neither its id nor its text, case and punctuation aside.
    """
    asked: dict[str, str] = {}
    built: dict[str, list[Objectives]] = {}
    left_out: dict[str, list[Rejected]] = {}
    for name, split in sorted(data.splits.items(), key=lambda item: PRECEDENCE.index(item[0])):
        own: dict[str, str] = {}
        known = ChainMap(own, asked)
        pools: list[list[Entry]] = []
        left_out[name] = []
        for file in split.files:
            pools.append([])
            for entry in read[file]:
                if reason := _why_not(entry, split, known):
                    left_out[name].append(entry.left_out(name, reason))
                else:
                    pools[-1].append(entry)
                    own |= dict.fromkeys(entry.keys, name)
        built[name] = compose(pools, split, Random(f"{data.seed}/{name}"))
        asked |= {key: name for objectives in built[name] for entry in objectives for key in entry.keys}
    return built, left_out


def compose(pools: Sequence[Sequence[Entry]], split: Split, random: Random) -> list[Objectives]:
    """Questions of as many objectives as ``split.objectives`` says, until ``max_questions`` or the pools are reached.

    Each objective comes from the pool of one of ``split.files``, by their weights; an empty pool leaves the draw.
    """
    left = [(random.sample(pool, len(pool)), file.weight) for pool, file in zip(pools, split.files, strict=True)]
    numbers, shares = list(split.objectives), list(split.objectives.values())
    questions: list[Objectives] = []
    while split.max_questions is None or len(questions) < split.max_questions:
        (number,) = random.choices(numbers, shares)
        if sum(len(pool) for pool, _ in left) < number:
            break
        questions.append([_draw(left, random) for _ in range(number)])
    return questions


def _draw(left: Sequence[tuple[list[Entry], float]], random: Random) -> Entry:
    filled = [(pool, weight) for pool, weight in left if pool]
    (pool,) = random.choices([pool for pool, _ in filled], [weight for _, weight in filled])
    return pool.pop()


def _why_not(entry: Entry, split: Split, asked: Mapping[str, str]) -> str | None:
    text, row_id = entry.keys
    if text in asked:
        return f"the same question is in {asked[text]}"
    if row_id in asked:
        return f"another question with the same id is in {asked[row_id]}"
    if max(split.objectives) > 1 and holds_separator(entry.golden_answers):
        return "a golden answer holds ';', which separates the answers of several objectives"
    return None

"""A dataset is a folder: a corpus, questions in three splits, what stands behind them, a tokenizer. Here, ``geo``'s."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mempo.config import Data, Model
from mempo.data.compose import ORDINALS, Objective, question_text, splits
from mempo.data.demos import WORDS
from mempo.data.geo import Entity, World, build_world
from mempo.records import Question
from mempo.scratch import train_bpe
from mempo.search import Retriever, render
from mempo.search.bm25 import BM25
from mempo.search.corpus import contents
from mempo.storage import read_records, whole_folder, write_json, write_records


@dataclass(frozen=True, slots=True)
class Truth:
    """What objective ``objective`` of a question rests on: hop i is ``entities[i]``'s ``relations[i]``, ``values[i]``.

    ``doc_ids[i]`` is the document that says so. The last value is the answer. ``ordinal`` names the objective.
    """

    question_id: str
    objective: int
    ordinal: str
    doc_ids: list[str]
    entities: list[str]
    relations: list[str]
    values: list[str]

    @property
    def chain(self) -> list[tuple[str, str]]:
        """(entity, value) of each hop."""
        return list(zip(self.entities, self.values, strict=True))


def read_truth(file: Path) -> dict[str, list[Truth]]:
    """By question, an entry an objective, from a dataset's ``truth.parquet``; empty where it has none."""
    truth: dict[str, list[Truth]] = {}
    for objective in read_records(file, Truth) if file.exists() else []:
        truth.setdefault(objective.question_id, []).append(objective)
    return truth


def prepare(
    data: Data, model: Model, folder: Path, system_prompts: Sequence[str] = (), *, searched_here: bool = True
) -> dict[str, Any]:
    """Write the whole dataset folder; returns its ``stats.json``. The same settings give the same bytes.

    ``searched_here``: its corpus is what a policy searches, and may not be empty; else ``search.urls`` are.
    """
    if data.source != "geo":
        from mempo.data.questions import prepare_questions

        return prepare_questions(data, model, folder, system_prompts, searched_here=searched_here)
    world = build_world(data)
    words = [" ".join(ORDINALS[: data.ordinals])] if data.ordinals else []
    bpe = train_bpe(tokenizer_texts(world, [*system_prompts, *words]), model.vocab_size)
    asked = splits(world, data, usable_names(world, bpe, data.max_name_tokens).__contains__)
    stats = {"num_documents": len(world), "splits": {name: split_stats(asked[name]) for name in asked}}
    with whole_folder(folder) as temporary:
        bpe.save(str(temporary / "tokenizer.json"))
        (temporary / "corpus.jsonl").write_text("".join(map(corpus_row, world.values())), encoding="utf-8")
        for name, questions in asked.items():
            records = [question_record(f"{name}-{i:05d}", objectives) for i, objectives in enumerate(questions)]
            write_records(temporary / f"{name}.parquet", records)
        write_records(temporary / "truth.parquet", truths(world, asked))
        write_json(temporary / "stats.json", stats)
    return stats


def usable_names(world: World, bpe: Tokenizer, max_tokens: int) -> set[str]:
    """Names and values of few tokens; an entity's name must also be found by a search for it (Guinea's is not)."""
    documents = [entity.document for entity in world.values()]
    first = dict(zip(world, Retriever(documents, BM25.build(documents)).find(list(world), top_k=1), strict=True))
    names = {name for entity in world.values() for name in (entity.name, *entity.facts.values())}
    return {
        name
        for name in names
        if len(bpe.encode(name).ids) <= max_tokens
        and (name not in world or [hit.document for hit in first[name]] == [world[name].document])
    }


def tokenizer_texts(world: World, system_prompts: Sequence[str]) -> list[str]:
    """The corpus, the words of the demonstrations, and each country's facts once more: they are asked most."""
    facts = [value for entity in world.values() for value in (entity.name, *entity.facts.values())]
    return [*(render([entity.document]) for entity in world.values()), *facts * 3, *frame_texts(system_prompts)]


def frame_texts(system_prompts: Sequence[str]) -> list[str]:
    """The words of the demonstrations, the prompts and the roles, as often as every tokenizer sees them."""
    return [*WORDS, *system_prompts, "system user assistant"] * 50


def corpus_row(entity: Entity) -> str:
    document = entity.document
    return json.dumps({"id": document.doc_id, "contents": contents(document)}) + "\n"


def question_record(question_id: str, objectives: Sequence[Objective]) -> Question:
    return Question(question_id, question_text(objectives), [[objective.answer] for objective in objectives], "geo")


def truths(world: World, asked: dict[str, list[list[Objective]]]) -> list[Truth]:
    return [
        Truth(
            question_id=f"{name}-{i:05d}",
            objective=number,
            ordinal=objective.ordinal,
            doc_ids=[world[fact.entity].doc_id for fact in objective.facts],
            entities=[fact.entity for fact in objective.facts],
            relations=[fact.relation for fact in objective.facts],
            values=[fact.value for fact in objective.facts],
        )
        for name, questions in asked.items()
        for i, objectives in enumerate(questions)
        for number, objective in enumerate(objectives)
    ]


def split_stats(questions: Sequence[Sequence[Objective]]) -> dict[str, Any]:
    """Counts, the answers' shares among objectives of questions of two or more, and the majority guesser's exact match.

    The guesser gives, for each number of objectives, the one answer that is right most often.
    """
    control = Counter(o.answer for objectives in questions if len(objectives) > 1 for o in objectives)
    patterns = Counter("".join(str(len(o.facts)) for o in objectives) for objectives in questions)
    total = max(1, control.total())
    return {
        "num_questions": len(questions),
        "patterns": dict(sorted(patterns.items())),
        "majority_em": majority_em(tuple(o.answer for o in objectives) for objectives in questions),
        "frequent_answers": {answer: count / total for answer, count in control.most_common(5)},
    }


def majority_em(answers: Iterable[tuple[str, ...]]) -> dict[str, float]:
    """The exact match of always giving the most frequent answers, for each number of objectives."""
    counted: dict[int, Counter[tuple[str, ...]]] = {}
    for given in answers:
        counted.setdefault(len(given), Counter())[given] += 1
    return {str(k): counts.most_common(1)[0][1] / counts.total() for k, counts in sorted(counted.items())}

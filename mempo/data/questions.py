"""The dataset folder of question files: the same files as ``geo`` has, but for the truth.

Beside them ``origins.parquet``: the row behind every objective, and ``rejected.jsonl``: every row that is not asked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mempo.choices import Layout
from mempo.config import Data, Model
from mempo.data import files, frame_texts, majority_em
from mempo.data.mixing import Objectives, question_text, splits
from mempo.data.reading import Entry, Pool, Rejected, Source, read_source, reasons
from mempo.records import Question
from mempo.scratch import train_bpe
from mempo.search import Document
from mempo.search.corpus import contents, rows
from mempo.sources import QuestionFile, Split
from mempo.storage import whole_folder, write_json, write_records

NOTHING_TO_SEARCH = "{}: no row of the question files has paragraphs; name a corpus, or search.urls"
TOKENIZER_LINES = 100_000  # of the corpus; a vocabulary of a few thousand is settled long before


@dataclass(frozen=True, slots=True)
class Origin:
    """Objective ``objective`` of a question is row ``row_id`` of dataset ``source``.

    ``doc_ids``: its gold paragraphs in the corpus; empty where the dataset has no paragraphs or does not mark them.
    """

    question_id: str
    objective: int
    source: str
    row_id: str
    question: str
    doc_ids: list[str]


def prepare_questions(
    data: Data, model: Model, folder: Path, system_prompts: Sequence[str], *, searched_here: bool = True
) -> dict[str, Any]:
    """Write the whole dataset folder; returns its ``stats.json``. The same files and settings give the same bytes.

    Raises ``ValueError`` where there is nothing to search and ``searched_here`` is true.
    """
    with whole_folder(folder) as temporary:
        built, stats = write_questions(data, temporary)
        if searched_here and not stats["num_documents"]:
            raise ValueError(NOTHING_TO_SEARCH.format("data.corpus"))
        if model.path is None:
            documents = (document for _, document in rows(temporary / "corpus.jsonl")) if stats["num_documents"] else ()
            bpe = train_bpe(tokenizer_texts(documents, built, system_prompts), model.vocab_size)
            bpe.save(str(temporary / "tokenizer.json"))
    return stats


def write_questions(data: Data, folder: Path) -> tuple[dict[str, list[Objectives]], dict[str, Any]]:
    """Corpus, the questions of each of ``data.splits``, where they are from, what is left out, ``stats.json``.

    Returns the objectives of each question, and the statistics.
    """
    given = None if data.corpus is None else files.local_file(data.corpus)
    num_given = 0 if given is None else sum(1 for _ in rows(given))
    corpus = folder / "corpus.jsonl"
    with open(os.devnull if given else corpus, "w", encoding="utf-8", newline="\n") as file:
        pool = Pool(file)
        sources = read_sources(data, pool)
    if given is not None:
        shutil.copyfile(given, corpus)
    built, left_out = splits(data, {file: named(source.entries, file) for file, source in sources.items()})
    for name in data.splits:
        if not built[name]:
            raise ValueError(f"data.{name}: not one question can be made of its files")
        write_records(folder / f"{name}.parquet", [record(name, i, o) for i, o in enumerate(built[name])])
    write_records(folder / "origins.parquet", origins(built, pooled=given is None))
    read = {(source.path, source.layout): source for source in sources.values()}.values()
    rejected = [*(source.rejected for source in read), *left_out.values()]
    write_rejected(folder / "rejected.jsonl", [row for rows_of_one in rejected for row in rows_of_one])
    stats = {
        "num_documents": num_given or len(pool.doc_ids),
        "splits": {n: split_stats(split, sources, built[n], left_out[n]) for n, split in data.splits.items()},
        "files": {told_path(source, read): file_stats(source) for source in read},
    }
    write_json(folder / "stats.json", stats)
    return built, stats


def read_sources(data: Data, pool: Pool) -> dict[QuestionFile, Source]:
    """Every file of every split, read once though two splits name it, by one name or two."""
    read: dict[tuple[str, Layout], Source] = {}
    found: dict[QuestionFile, Source] = {}
    for file in [file for split in data.splits.values() for file in split.files]:
        layout = layout_of(file, data)
        if (file.path, layout) not in read:
            read[file.path, layout] = read_source(file.path, layout, pool, data.max_rejected)
        found[file] = read[file.path, layout]
    return found


def named(entries: Sequence[Entry], file: QuestionFile) -> Sequence[Entry]:
    return [replace(entry, source=file.name) for entry in entries] if file.name else entries


def told_path(source: Source, read: Collection[Source]) -> str:
    """Its path, and the layout where the file is read in several."""
    several = sum(other.path == source.path for other in read) > 1
    return f"{source.path} as {source.layout}" if several else source.path


def layout_of(file: QuestionFile, data: Data) -> Layout:
    layout = file.source or data.source
    assert layout != "geo", "geo has no files"
    return layout


def record(split: str, index: int, objectives: Objectives) -> Question:
    return Question(
        question_id=f"{split}-{index:05d}",
        question=question_text([entry.question for entry in objectives]),
        golden_answers=[entry.golden_answers for entry in objectives],
        source="+".join(sorted({entry.source for entry in objectives})),
    )


def origins(built: Mapping[str, Sequence[Objectives]], *, pooled: bool) -> list[Origin]:
    return [
        Origin(f"{name}-{i:05d}", number, entry.source, entry.row_id, entry.question, entry.doc_ids if pooled else [])
        for name, questions in built.items()
        for i, objectives in enumerate(questions)
        for number, entry in enumerate(objectives)
    ]


def write_rejected(path: Path, rows: Sequence[Rejected]) -> None:
    """JSON lines of ``Rejected``."""
    text = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")  # half a surrogate pair: \\ud800


def tokenizer_texts(
    documents: Iterable[Document], built: Mapping[str, Sequence[Objectives]], system_prompts: Sequence[str]
) -> Iterator[str]:
    """The beginning of the corpus, the training questions with their answers, and the words of the demonstrations."""
    yield from map(contents, islice(documents, TOKENIZER_LINES))
    for objectives in built["train"]:
        for entry in objectives:
            yield from (entry.question, entry.golden_answers[0])
    yield from frame_texts(system_prompts)


def split_stats(
    split: Split, sources: Mapping[QuestionFile, Source], questions: Sequence[Objectives], left_out: Sequence[Rejected]
) -> dict[str, Any]:
    """Counts by number of objectives and by dataset, and the exact match of always giving the most frequent answers.

    ``num_unused``: rows that could be asked, and were not needed or did not fill a last question.
    """
    datasets = Counter(entry.source for objectives in questions for entry in objectives)
    num_read = sum(len(sources[file].entries) for file in split.files)
    return {
        "num_questions": len(questions),
        "num_objectives": {str(number): count for number, count in sorted(Counter(map(len, questions)).items())},
        "datasets": dict(sorted(datasets.items())),
        "majority_em": majority_em(tuple(e.golden_answers[0] for e in objectives) for objectives in questions),
        "left_out": reasons(left_out),
        "num_unused": num_read - len(left_out) - datasets.total(),
    }


def file_stats(source: Source) -> dict[str, Any]:
    """``num_unmarked``: questions of which no gold paragraph is known."""
    num_unmarked = sum(not entry.doc_ids for entry in source.entries)
    return {
        "sha256": source.sha256,
        "num_rows": source.num_rows,
        "num_unmarked": num_unmarked,
        "rejected": reasons(source.rejected),
    }

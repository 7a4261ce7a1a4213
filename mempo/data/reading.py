"""Question files read once, row by row: what can be asked, the pool of their paragraphs, and every row left out."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TextIO

from mempo.choices import Layout
from mempo.data import files
from mempo.data.layouts import Example, Paragraph, columns_of, read_example
from mempo.search import Document
from mempo.search.corpus import contents
from mempo.storage import content_hash

# What two writings of one question differ in; symbols stay, for 7 - 5 is another question than 7 + 5.
_MARKS = re.compile(r"[\s.,;:!?\"'`´‘’“”„«»()\[\]{}¿¡…、。，；：！？「」『』（）]+")
# Datasets that number every question once, in whatever file it stands; FlashRAG and others count in each file anew.
_NUMBERED: frozenset[Layout] = frozenset({"hotpotqa", "2wiki", "musique"})


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that is not asked, and why; ``split``: in which, where it is for that split's sake."""

    file: str
    row: int
    reason: str
    excerpt: str
    split: str = ""


@dataclass(frozen=True)
class Entry:
    """A question that can be asked, from row ``row`` of ``file``; ``doc_ids``: its gold paragraphs in the pool."""

    file: str
    row: int
    source: str
    row_id: str
    question: str
    golden_answers: list[str]
    doc_ids: list[str]
    scope: str  # where no two rows have one id: the layout's dataset, or the file

    @cached_property
    def keys(self) -> tuple[str, str]:
        """Text and id: of no two rows that are asked is one of them the same."""
        words = _MARKS.sub(" ", unicodedata.normalize("NFKC", self.question).casefold()).strip()
        return f"text {words or self.question}", f"id {self.scope} {self.row_id}"

    def left_out(self, split: str, reason: str) -> Rejected:
        return Rejected(self.file, self.row, reason, self.question[: files.EXCERPT_CHARS], split)


@dataclass(frozen=True, slots=True)
class Source:
    """What one file gave, read in ``layout``."""

    path: str
    layout: Layout
    sha256: str
    entries: list[Entry]
    rejected: list[Rejected]

    @property
    def num_rows(self) -> int:
        return len(self.entries) + len(self.rejected)


@dataclass(frozen=True, slots=True)
class Pool:
    """The corpus that is written to ``file`` row by row: each paragraph once, by title and text together.

    A title alone is no key: two paragraphs of one article, or two articles of one name, are two documents.
    """

    file: TextIO
    doc_ids: set[str] = field(default_factory=set)

    def add(self, paragraph: Paragraph) -> str:
        """The id of the document: the beginning of the sha256 of its contents."""
        told = contents(Document("", paragraph.title, paragraph.text))
        doc_id = hashlib.sha256(told.encode()).hexdigest()[:16]
        if doc_id not in self.doc_ids:
            self.doc_ids.add(doc_id)
            self.file.write(json.dumps({"id": doc_id, "contents": told}, ensure_ascii=False) + "\n")
        return doc_id


def read_examples(path: Path, layout: Layout, label: str = "") -> Iterator[tuple[int, Example | Rejected]]:
    """(row number from 1, what it is). Raises ``ValueError`` where the file itself is damaged."""
    file = label or str(path)
    taken: set[str] = set()
    for number, row in enumerate(files.read_rows(path, columns_of(layout)), 1):
        if isinstance(row, files.Unreadable):
            yield number, Rejected(file, number, row.reason, row.excerpt)
            continue
        try:
            example = read_example(layout, row)
        except ValueError as error:
            yield number, Rejected(file, number, str(error), files.excerpt(row))
            continue
        if example.row_id in taken:
            yield number, Rejected(file, number, "the id of a row before it", example.question[: files.EXCERPT_CHARS])
            continue
        taken |= {example.row_id} - {""}
        yield number, example


def read_source(path: str, layout: Layout, pool: Pool, max_rejected: float) -> Source:
    """Raises ``ValueError``, with the reasons, where more than ``max_rejected`` of the rows are rejected."""
    local = files.local_file(path)
    source = Source(path, layout, content_hash(local), [], [])
    for number, example in read_examples(local, layout, path):
        if isinstance(example, Rejected):
            source.rejected.append(example)
        else:
            source.entries.append(_entry(path, layout, number, example, pool))
    _refuse_too_many(source, max_rejected)
    return source


def _entry(path: str, layout: Layout, number: int, example: Example, pool: Pool) -> Entry:
    documents = [(pool.add(paragraph), paragraph.gold) for paragraph in example.paragraphs if paragraph.text]
    return Entry(
        file=path,
        row=number,
        source=example.source or layout,
        row_id=example.row_id or f"{Path(path).name}:{number}",
        question=example.question,
        golden_answers=example.golden_answers,
        doc_ids=list(dict.fromkeys(doc_id for doc_id, gold in documents if gold)),
        scope=layout if layout in _NUMBERED and example.row_id else path,
    )


def _refuse_too_many(source: Source, max_rejected: float) -> None:
    if not source.num_rows:
        raise ValueError(f"{source.path}: no rows in it")
    if len(source.rejected) > max_rejected * source.num_rows:
        raise ValueError(
            f"{source.path}: {len(source.rejected)} of {source.num_rows} rows cannot be used, more than "
            f"data.max_rejected: {max_rejected:g} of them\n" + "\n".join(summary(source.rejected))
        )


def summary(rejected: list[Rejected]) -> list[str]:
    """A line a reason, the most frequent first, with its first row."""
    first: dict[str, int] = {}
    for row in rejected:
        first.setdefault(row.reason, row.row)
    counts = Counter(row.reason for row in rejected)
    return [f"  {count} x {reason} (first in row {first[reason]})" for reason, count in counts.most_common()]


def reasons(rejected: Sequence[Rejected]) -> dict[str, int]:
    return dict(sorted(Counter(row.reason for row in rejected).items()))

"""What a question file or a corpus holds (``mempo data check``): counts, rejects, answers in the paragraphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mempo.choices import Layout
from mempo.data.layouts import Example
from mempo.data.reading import Rejected, read_examples, summary
from mempo.rewards import holds_separator, normalized_words
from mempo.search.corpus import rows

YES_NO = {"yes", "no"}  # answers that need no paragraph to hold them


@dataclass(frozen=True, slots=True)
class Checked:
    """``lines`` are for people; ``misses`` are answers, with row and question, that no gold paragraph holds."""

    lines: list[str]
    rejected: list[Rejected] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)


def check_questions(path: Path, layout: Layout) -> Checked:
    """Raises ``ValueError`` where the file itself is damaged."""
    rejected: list[Rejected] = []
    misses: list[str] = []
    counts: Counter[str] = Counter()
    datasets: Counter[str] = Counter()
    for number, example in read_examples(path, layout):
        if isinstance(example, Rejected):
            rejected.append(example)
            continue
        datasets[example.source or layout] += 1
        counts["answers"] += len(example.golden_answers)
        counts["paragraphs"] += len(example.paragraphs)
        counts["bare"] += not example.paragraphs
        counts["semicolons"] += holds_separator(example.golden_answers)
        has_gold = any(paragraph.gold for paragraph in example.paragraphs)
        if has_gold and not YES_NO.issuperset(answer.casefold() for answer in example.golden_answers):
            counts["marked"] += 1
            if not answered(example):
                misses.append(f"row {number}: {example.question} {example.golden_answers[0]}")
    lines = [
        f"{path}: {datasets.total()} questions, {len(rejected)} rows rejected",
        *summary(rejected),
        "datasets: " + ", ".join(f"{name} {count}" for name, count in datasets.most_common()),
        f"{counts['answers']} answers, those of {counts['semicolons']} questions with a ';'",
        f"{counts['paragraphs']} paragraphs, {counts['bare']} questions without any",
    ]
    if marked := counts["marked"]:
        lines.append(
            f"a gold paragraph holds the answer: {1 - len(misses) / marked:.3f} of {marked}, yes and no left out"
        )
    return Checked(lines, rejected, misses)


def check_corpus(path: Path) -> Checked:
    """Raises ``ValueError`` naming the first row that is no document."""
    counts: Counter[str] = Counter()
    ids: Counter[str] = Counter()
    for _, document in rows(path):
        ids[document.doc_id] += 1
        counts["unquoted"] += not document.quoted
        counts["no text"] += not document.text.strip()
        counts["doubled"] += '""' in document.text
    repeated = sum(count > 1 for count in ids.values())
    return Checked(
        [
            f"{path}: {ids.total()} documents, {repeated} ids that occur twice",
            f"{counts['unquoted']} titles without quotes, {counts['doubled']} texts with doubled quotes, "
            f"{counts['no text']} without text",
        ]
    )


def answered(example: Example) -> bool:
    """Whether a gold paragraph holds one of the answers; both as ``squad`` compares them, so Hall is in Hall's."""
    text = _plain(f"{p.title} {p.text}" for p in example.paragraphs if p.gold)
    return any(_plain([gold]) in text for gold in example.golden_answers)


def _plain(texts: Iterable[str]) -> str:
    return " ".join(word for text in texts for word in normalized_words(text, "squad"))

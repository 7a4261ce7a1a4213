"""How many gold paragraphs a retriever finds for the questions of a dataset folder (``mempo data recall``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mempo.data.questions import Origin
from mempo.search import Retriever
from mempo.search.index import in_memory, open_index
from mempo.sources import SPLITS
from mempo.storage import read_records

_AT_ONCE = 256  # questions


@dataclass(frozen=True, slots=True)
class Recall:
    """Of the questions of one dataset in one split, an objective counting as one; ``split`` is ``all`` for their sum.

    ``num_unmarked`` of them have no gold paragraph that is known, and are in no other count.
    """

    source: str
    split: str
    num_questions: int
    num_unmarked: int
    num_gold: int
    num_found: int
    num_whole: int

    @property
    def recall(self) -> float:
        """Gold paragraphs among the k best for their question, of all gold paragraphs."""
        return self.num_found / self.num_gold

    @property
    def whole(self) -> float:
        """Questions all of whose gold paragraphs are among the k best."""
        return self.num_whole / (self.num_questions - self.num_unmarked)


def measure(folder: Path, top_k: int, index: Path | None = None) -> list[Recall]:
    """A row a dataset and split that has gold paragraphs, and one for all splits of a dataset that is in several.

    The query is the text of the row behind an objective, never a joined question. Raises ``ValueError`` where no gold
    paragraph is known.
    """
    file = folder / "origins.parquet"
    if folder.is_dir() and not file.exists():
        raise ValueError(f"{folder}: no origins.parquet: only questions from files have gold paragraphs to find")
    origins = read_records(file, Origin)
    if not any(origin.doc_ids for origin in origins):
        raise ValueError(f"{file}: no gold paragraph of any question is known (data.corpus, or rows that mark none)")
    corpus = folder / "corpus.jsonl"
    retriever = in_memory(corpus) if index is None else open_index(index, corpus)
    found = [
        _counted(source, split, of_split, retriever, top_k)
        for source in sorted({origin.source for origin in origins})
        for split in SPLITS
        if (of_split := [o for o in origins if o.source == source and o.question_id.startswith(f"{split}-")])
    ]
    return [row for row in _with_sums(found) if row.num_gold]


def _counted(source: str, split: str, origins: Sequence[Origin], retriever: Retriever, top_k: int) -> Recall:
    marked = [origin for origin in origins if origin.doc_ids]
    num_found = num_whole = 0
    for start in range(0, len(marked), _AT_ONCE):
        some = marked[start : start + _AT_ONCE]
        for origin, hits in zip(some, retriever.find([origin.question for origin in some], top_k), strict=True):
            missed = set(origin.doc_ids) - {hit.document.doc_id for hit in hits}
            num_found += len(set(origin.doc_ids)) - len(missed)
            num_whole += not missed
    return Recall(
        source=source,
        split=split,
        num_questions=len(origins),
        num_unmarked=len(origins) - len(marked),
        num_gold=sum(len(set(origin.doc_ids)) for origin in marked),
        num_found=num_found,
        num_whole=num_whole,
    )


def _with_sums(rows: Sequence[Recall]) -> Iterable[Recall]:
    for source in dict.fromkeys(row.source for row in rows):
        of_source = [row for row in rows if row.source == source]
        yield from of_source
        if len(of_source) > 1:
            counts = zip(*((r.num_questions, r.num_unmarked, r.num_gold, r.num_found, r.num_whole) for r in of_source),
                         strict=True)  # fmt: skip
            yield Recall(source, "all", *map(sum, counts))


def table(rows: Sequence[Recall], top_k: int) -> Table:
    shown = Table(box=SIMPLE_HEAD, show_edge=False)
    shown.add_column("dataset")
    shown.add_column("split")
    for name in ("questions", "unmarked", "gold", f"recall@{top_k}", "all found"):
        shown.add_column(name, justify="right")
    for row in rows:
        counts = [str(count) for count in (row.num_questions, row.num_unmarked, row.num_gold)]
        shown.add_row(row.source, row.split, *counts, f"{row.recall:.3f}", f"{row.whole:.3f}")
    return shown

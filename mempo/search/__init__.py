"""The search tool: documents, a ranking of them for a query, and the observation that the best become.

What a searcher returns is untrusted text; it is tokenised as plain text later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from mempo.config import Search

NOTHING_FOUND = "No document found."


@dataclass(frozen=True, slots=True)
class Document:
    """``quoted``: whether its row has the title in quotes, as most of wiki-18."""

    doc_id: str
    title: str
    text: str
    quoted: bool = True


class Hit(NamedTuple):
    document: Document
    score: float


class ToolError(RuntimeError):
    """The tool could not be asked: the trajectory is in no statistic. Finding nothing is an ordinary observation."""


class Searcher(Protocol):
    async def search(self, query: str) -> str:
        """The observation for ``query``. Raises ``ToolError``."""
        ...


class Ranking(Protocol):
    def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """For each query the places of at most ``top_k`` documents and their scores, best first. For any thread."""
        ...


class Retriever:
    """The documents of a corpus and a ranking of their places in it."""

    def __init__(self, documents: Sequence[Document], ranking: Ranking) -> None:
        self._documents, self._ranking = documents, ranking

    def __len__(self) -> int:
        return len(self._documents)

    def find(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """For each query at most ``top_k`` documents, best first."""
        ranked = self._ranking.rank(queries, top_k)
        return [[Hit(self._documents[place], score) for place, score in places] for places in ranked]


class LocalSearcher:
    """Asks a retriever of this process. It answers inside one step of the event loop: batches stay as they were."""

    def __init__(self, retriever: Retriever, top_k: int) -> None:
        self._retriever, self._top_k = retriever, top_k

    async def search(self, query: str) -> str:
        return render([hit.document for hit in self._retriever.find([query], self._top_k)[0]])


@cache
def open_searcher(corpus: Path, config: Search) -> Searcher:
    """The servers of ``search.urls``; else this process, over ``corpus``, with ``search.index`` or one in memory.

    Each is opened once in a process: a corpus that is written anew under the same path is not read again.
    """
    if config.urls:
        from mempo.search.http import HTTPSearcher

        return HTTPSearcher(config)
    from mempo.search import index

    retriever = index.open_index(Path(config.index), corpus) if config.index else index.in_memory(corpus)
    return LocalSearcher(retriever, config.top_k)


def render(documents: Sequence[Document]) -> str:
    """An observation: title and text of each document, one below the other."""
    return "\n".join(f"{document.title}\n{document.text}" for document in documents) or NOTHING_FOUND

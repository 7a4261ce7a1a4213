"""BM25 over documents in memory, by bm25s."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import bm25s

from mempo.search import Document, render

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells of every index it builds

# Words; characters of scripts written without blanks stand alone, or a whole sentence would be one word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
MAX_QUERY_WORDS = 256  # a query of thousands of words is noise; its beginning is enough


def words(text: str) -> list[str]:
    """
    >>> words("Côte d'Ivoire: 北京_7")
    ['côte', 'd', 'ivoire', '北', '京', '7']
    """
    return _WORD.findall(text.lower())


class BM25Searcher:
    """The ``top_k`` documents that share a word with the query, best first; equal scores in the order of the corpus."""

    def __init__(self, documents: Sequence[Document], *, top_k: int = 1) -> None:
        self._documents = list(documents)
        self._top_k = top_k
        self._index = bm25s.BM25()
        self._index.index([words(f"{d.title} {d.text}") for d in self._documents], show_progress=False)

    def find(self, query: str) -> list[Document]:
        known = [word for word in words(query)[:MAX_QUERY_WORDS] if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = (-scores).argsort(kind="stable")[: self._top_k]
        return [self._documents[index] for index in best if scores[index] > 0]

    async def search(self, query: str) -> str:
        return render(self.find(query))

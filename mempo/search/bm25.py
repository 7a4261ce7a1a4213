"""BM25 by bm25s, in memory or memory-mapped from a folder."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from mempo.search import Document

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


class BM25:
    """Ranks the documents that share a word with the query; equal scores in the order of the corpus.

    Formula and constants are bm25s's defaults: Lucene's, k1 = 1.5, b = 0.75 (Lù 2024, arXiv 2407.03618).
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def build(cls, documents: Iterable[Document]) -> BM25:
        """Of documents that are seen once: only the numbers of their words are kept, 4 bytes a word."""
        numbers = {"": 0}  # bm25s takes no empty vocabulary
        texts = (words(f"{document.title} {document.text}") for document in documents)
        numbered = [array("i", [numbers.setdefault(word, len(numbers)) for word in text]) for text in texts]
        index = bm25s.BM25()
        with np.errstate(invalid="ignore"):  # a corpus without a word has a mean length of 0
            index.index((numbered, numbers), show_progress=False)
        return cls(index)

    def save(self, folder: Path) -> None:
        self._index.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> BM25:
        """The scores stay on the disk, the vocabulary comes into memory."""
        return cls(bm25s.BM25.load(folder, mmap=True, show_progress=False))

    def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        return [self._rank(query, top_k) for query in queries]

    def _rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        known = [word for word in words(query)[:MAX_QUERY_WORDS] if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        return [(int(place), float(scores[place])) for place in best(scores, top_k)]


def best(scores: np.ndarray[Any, Any], top_k: int) -> np.ndarray[Any, Any]:
    """Places of the ``top_k`` highest scores above 0, best first, equal ones in order.

    >>> best(np.array([1.0, 3.0, 0.0, 3.0, 1.0]), 3).tolist()
    [1, 3, 0]
    """
    floor = np.partition(scores, -top_k)[-top_k] if top_k < len(scores) else 0.0
    places = np.flatnonzero((scores >= floor) & (scores > 0))
    return places[np.argsort(-scores[places], kind="stable")][:top_k]

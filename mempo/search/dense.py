"""Dense retrieval: vectors of a sentence-transformers encoder, compared by FAISS. The extra ``dense`` brings both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from mempo.search import Document

Vectors: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

BATCH = 1024  # documents that are encoded before their vectors go into the index


class Encoder(Protocol):
    def encode(self, texts: Sequence[str], *, queries: bool) -> Vectors:
        """float32 of shape [texts, width], rows of length 1: their products are cosines."""
        ...


class EncoderSpec(BaseModel):
    """``model``: a sentence-transformers folder or hub id. The prompts are put before each text (E5: "query: ")."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str
    query_prompt: str | None = None
    document_prompt: str | None = None


class SentenceEncoder:
    """An encoder of sentence-transformers; without prompts of ``spec`` those that the model itself brings are used."""

    def __init__(self, model: Any, spec: EncoderSpec) -> None:
        self._model, self._spec = model, spec
        self._alone = threading.Lock()  # a tokenizer in two threads at once is an error in tokenizers

    def encode(self, texts: Sequence[str], *, queries: bool) -> Vectors:
        encode = self._model.encode_query if queries else self._model.encode_document
        prompt = self._spec.query_prompt if queries else self._spec.document_prompt
        with self._alone:
            vectors = encode(list(texts), prompt=prompt, normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, dtype=np.float32)


class Dense:
    """Ranks all documents by the cosine of their vector with the query's: an exhaustive search."""

    def __init__(self, index: Any, encoder: Encoder) -> None:
        self._index, self._encoder = index, encoder

    @classmethod
    def build(cls, documents: Sequence[Document], encoder: Encoder) -> Dense:
        index: Any = None
        for start in range(0, len(documents), BATCH):
            batch = documents[start : start + BATCH]
            vectors = encoder.encode([f"{document.title}\n{document.text}" for document in batch], queries=False)
            index = index or _faiss().IndexFlatIP(vectors.shape[1])
            index.add(vectors)
        return cls(index, encoder)

    def save(self, file: Path) -> None:
        _faiss().write_index(self._index, str(file))

    @classmethod
    def load(cls, file: Path, encoder: Encoder) -> Dense:
        """The vectors stay on the disk."""
        faiss = _faiss()
        return cls(faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC), encoder)

    def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        if not queries:
            return []
        vectors = self._encoder.encode(queries, queries=True)
        scores, places = self._index.search(vectors, min(top_k, self._index.ntotal))
        return [list(zip(row, line, strict=True)) for row, line in zip(places.tolist(), scores.tolist(), strict=True)]


def open_encoder(spec: EncoderSpec) -> SentenceEncoder:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise _missing("sentence-transformers") from None
    return SentenceEncoder(SentenceTransformer(spec.model), spec)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise _missing("faiss") from None
    return faiss


def _missing(package: str) -> ValueError:
    return ValueError(f"{package} is missing: `pip install --constraint constraints.txt -e '.[dense]'` brings it")

"""An index of a corpus on the disk, made once (``mempo index``): JSON, numpy and FAISS files, no pickle.

``manifest.json`` names the corpus by content; ``starts.npy`` holds the byte at which each document's line begins.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from mempo import storage
from mempo.search import Document, Ranking, Retriever
from mempo.search.bm25 import BM25
from mempo.search.corpus import Corpus, read_corpus, rows
from mempo.search.dense import Dense, Encoder, EncoderSpec, open_encoder
from mempo.search.fusion import Fused

Kind = Literal["bm25", "dense", "hybrid"]
FILES = {"manifest.json", "starts.npy", "bm25", "dense.faiss"}


class Manifest(BaseModel):
    """``corpus``: its path from the index's folder; ``encoder``: of the kinds dense and hybrid.

    ``format``: raised whenever files, or what a word is, change.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    kind: Kind
    corpus: str
    sha256: str
    num_documents: int
    encoder: EncoderSpec | None = None


def in_memory(corpus: Path) -> Retriever:
    """BM25 over documents that are all read now: a corpus of thousands needs no index on the disk."""
    documents = read_corpus(corpus)
    return Retriever(documents, BM25.build(documents))


def build(
    corpus: Path, folder: Path, kind: Kind = "bm25", spec: EncoderSpec | None = None, encoder: Encoder | None = None
) -> Manifest:
    """Index ``corpus`` in ``folder``, which appears whole. ``spec`` names the encoder, ``encoder`` is one made already.

    Raises ``ValueError`` for a damaged corpus, for a folder that holds something else, for a kind without its encoder.
    """
    if not storage.replaceable(folder, FILES):
        raise ValueError(f"{folder}: holds something that is no index, and would be replaced")
    if (kind != "bm25") != (spec is not None):
        raise ValueError(f"--kind {kind}: {'needs' if spec is None else 'has no use for'} an --encoder")
    if spec is not None and encoder is None:
        encoder = open_encoder(spec)
    sha256, starts = storage.content_hash(corpus), array("q")

    def documents() -> Iterator[Document]:
        for start, document in rows(corpus):
            starts.append(start)
            yield document

    with storage.whole_folder(folder) as temporary:
        if kind == "dense":
            starts.extend(start for start, _ in rows(corpus))
        else:
            BM25.build(documents()).save(temporary / "bm25")
        if encoder is not None:
            Dense.build(Corpus(corpus, starts), encoder).save(temporary / "dense.faiss")
        np.save(temporary / "starts.npy", np.asarray(starts), allow_pickle=False)
        where = os.path.relpath(corpus.resolve(), folder.resolve())
        manifest = Manifest(kind=kind, corpus=where, sha256=sha256, num_documents=len(starts), encoder=spec)
        storage.write_json(temporary / "manifest.json", manifest.model_dump(mode="json"))
    return manifest


def open_index(folder: Path, corpus: Path | None = None, encoder: Encoder | None = None) -> Retriever:
    """The retriever of an index; its corpus is where it was, or at ``corpus``. Documents are read when they are found.

    Raises ``ValueError`` where the index is of another corpus, or damaged; ``FileNotFoundError`` where one is missing.
    """
    manifest = storage.read_as(Manifest, folder / "manifest.json")
    corpus = corpus or Path(os.path.normpath(folder / manifest.corpus))
    if storage.content_hash(corpus) != manifest.sha256:
        raise ValueError(
            f"{folder}: an index of another corpus than {corpus}; `mempo index {corpus} {folder}` makes it anew"
        )
    starts = np.load(folder / "starts.npy", mmap_mode="r", allow_pickle=False)
    if len(starts) != manifest.num_documents:
        raise ValueError(f"{folder}: starts.npy has {len(starts)} documents, manifest.json {manifest.num_documents}")
    return Retriever(Corpus(corpus, starts), _ranking(folder, manifest, encoder))


def _ranking(folder: Path, manifest: Manifest, encoder: Encoder | None) -> Ranking:
    rankings: list[Ranking] = []
    if manifest.kind != "dense":
        rankings.append(BM25.load(folder / "bm25"))
    if manifest.encoder is not None:
        rankings.append(Dense.load(folder / "dense.faiss", encoder or open_encoder(manifest.encoder)))
    return Fused(rankings) if len(rankings) > 1 else rankings[0]

"""Dense and hybrid retrieval, with FAISS and sentence-transformers themselves and an encoder made on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mempo.search import Document, index
from mempo.search.bm25 import BM25
from mempo.search.corpus import read_corpus
from mempo.search.dense import BATCH, Dense, EncoderSpec, Vectors, open_encoder
from mempo.search.fusion import fused
from tests.tiny import make_tokenizer

pytest.importorskip("faiss", reason="the extra `dense` is not installed")
sentence_transformers = pytest.importorskip("sentence_transformers", reason="the extra `dense` is not installed")

TEXTS = ["Ulm lies on the Danube.", "Paris lies on the Seine.", "The Euro is the currency of France.", "Danube, Inn."]


class Letters:
    """A vector is the counts of its text's letters, of length 1."""

    def encode(self, texts: Sequence[str], *, queries: bool) -> Vectors:
        counts = np.array([[text.lower().count(chr(97 + i)) + 1e-3 for i in range(26)] for text in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [{"id": str(i), "contents": f'"T"\n{text}'} for i, text in enumerate(TEXTS)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sentence-transformers folder: a BERT of width 32 with random weights, mean pooling."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None  # else a prompt becomes a message of its own
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    sentence_transformers.SentenceTransformer(str(folder / "bert"), device="cpu").save(str(folder / "encoder"))
    return str(folder / "encoder")


def places(retriever: Any, query: str, top_k: int) -> list[tuple[str, float]]:
    return [(hit.document.doc_id, hit.score) for hit in retriever.find([query], top_k)[0]]


def test_dense_ranks_by_cosine(corpus: Path, tmp_path: Path) -> None:
    index.build(corpus, tmp_path / "index", "dense", EncoderSpec(model="letters"), Letters())
    retriever = index.open_index(tmp_path / "index", encoder=Letters())
    [query], rows = (
        Letters().encode(["danube"], queries=True),
        Letters().encode([f"T\n{t}" for t in TEXTS], queries=False),
    )
    cosines = rows @ query
    expected = [(str(i), pytest.approx(cosines[i], rel=1e-5)) for i in np.argsort(-cosines)]
    assert places(retriever, "danube", 9) == expected
    assert places(retriever, "danube", 2) == expected[:2]
    assert retriever.find([], 2) == []


def test_hybrid_is_the_fusion_of_both(corpus: Path, tmp_path: Path) -> None:
    index.build(corpus, tmp_path / "index", "hybrid", EncoderSpec(model="letters"), Letters())
    documents = read_corpus(corpus)
    both = [BM25.build(documents), Dense.build(documents, Letters())]
    expected = fused([ranking.rank(["the danube"], 100)[0] for ranking in both])[:3]
    found = places(index.open_index(tmp_path / "index", encoder=Letters()), "the danube", 3)
    assert found == [(str(place), score) for place, score in expected]


def test_batches_of_documents_keep_their_order() -> None:
    documents = [Document(str(i), "T", "zzz" if i == BATCH + 3 else "abc") for i in range(BATCH + 7)]
    assert Dense.build(documents, Letters()).rank(["zzz"], 1)[0][0][0] == BATCH + 3


def test_an_encoder_of_sentence_transformers(corpus: Path, tmp_path: Path, model: str) -> None:
    spec = EncoderSpec(model=model, query_prompt="query: ", document_prompt="passage: ")
    manifest = index.build(corpus, tmp_path / "index", "dense", spec)
    assert manifest.encoder == spec
    retriever = index.open_index(tmp_path / "index")
    encoder = sentence_transformers.SentenceTransformer(model, device="cpu")
    vectors = encoder.encode([f"passage: T\n{text}" for text in TEXTS], normalize_embeddings=True)
    cosines = vectors @ encoder.encode("query: river", normalize_embeddings=True)
    assert dict(places(retriever, "river", 4)) == pytest.approx({str(i): c for i, c in enumerate(cosines)}, rel=1e-4)


def test_an_encoder_may_be_asked_from_many_threads(model: str) -> None:
    encoder = open_encoder(EncoderSpec(model=model))
    alone = [encoder.encode([text], queries=True) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: encoder.encode([text], queries=True), TEXTS * 16))
    for vector, expected in zip(together, alone * 16, strict=True):
        np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-6)

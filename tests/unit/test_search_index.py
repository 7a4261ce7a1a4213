"""An index on the disk answers as the one in memory does, and is taken for no other corpus."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mempo.config import Search
from mempo.search import Document, Retriever, open_searcher
from mempo.search.bm25 import BM25, best, words
from mempo.search.corpus import contents, read_corpus
from mempo.search.index import build, in_memory, open_index

# Few words: many documents have the same score for a query.
TEXTS = st.lists(st.sampled_from(["ulm", "Paris", "北京", "river", "of", "!", '"', "\u2028", "\u0085"]), max_size=6)


def write(path: Path, documents: list[Document]) -> Path:
    rows = [json.dumps({"id": d.doc_id, "contents": contents(d)}, ensure_ascii=False) for d in documents]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def made(texts: list[list[str]]) -> list[Document]:
    return [Document(str(i), f"T{i % 3}", " ".join(text)) for i, text in enumerate(texts)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "data" / "c.jsonl", made([["ulm"], ["Paris", "ulm"], ["river"]]))


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()


@settings(max_examples=15)
@given(texts=st.lists(TEXTS, min_size=1, max_size=30), queries=st.lists(TEXTS, max_size=4), top_k=st.integers(1, 40))
def test_the_disk_answers_as_memory_does(texts: list[list[str]], queries: list[list[str]], top_k: int) -> None:
    documents = made(texts)
    asked = [" ".join(query) for query in queries]
    with tempfile.TemporaryDirectory() as folder:
        corpus = write(Path(folder) / "c.jsonl", documents)
        build(corpus, Path(folder) / "index")
        assert open_index(Path(folder) / "index").find(asked, top_k) == in_memory(corpus).find(asked, top_k)


@given(texts=st.lists(TEXTS, min_size=1, max_size=30), query=TEXTS, top_k=st.integers(1, 40))
def test_scores_are_those_of_the_formula(texts: list[list[str]], query: list[str], top_k: int) -> None:
    documents = made(texts)
    found = BM25.build(documents).rank([" ".join(query)], top_k)[0]
    exact = by_formula([words(f"{d.title} {d.text}") for d in documents], words(" ".join(query)))
    places, scores = [place for place, _ in found], [score for _, score in found]
    np.testing.assert_allclose(scores, [exact[place] for place in places], rtol=1e-5)
    np.testing.assert_allclose(scores, sorted((s for s in exact if s > 0), reverse=True)[:top_k], rtol=1e-5)
    assert found == sorted(found, key=lambda item: (-item[1], item[0]))


def by_formula(texts: list[list[str]], query: list[str]) -> list[float]:
    """BM25 of Lucene's kind, k1 = 1.5, b = 0.75, of every text."""
    mean = sum(map(len, texts)) / len(texts)
    totals = []
    for text in texts:
        total = 0.0
        for word in query:
            holding = sum(word in other for other in texts)
            rarity = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            count = text.count(word)
            total += rarity * count / (count + 1.5 * (0.25 + 0.75 * len(text) / mean))
        totals.append(total)
    return totals


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5]), min_size=1), st.integers(1, 60))
def test_the_best_are_those_of_a_stable_sort(scores: list[float], top_k: int) -> None:
    values = np.array(scores, dtype=np.float32)
    order = sorted((i for i in range(len(scores)) if scores[i] > 0), key=lambda i: -scores[i])
    assert best(values, top_k).tolist() == order[:top_k]


def test_a_searcher_over_an_index(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "index")
    searcher = open_searcher(corpus, Search(index=str(tmp_path / "index")))
    assert asyncio.run(searcher.search("Paris")) == "T1\nParis ulm"


def test_an_index_of_another_corpus_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "index")
    other = write(tmp_path / "other.jsonl", made([["ulm"]]))
    with pytest.raises(ValueError, match=r"index: an index of another corpus than .*other\.jsonl; `mempo index"):
        open_index(tmp_path / "index", other)
    corpus.write_text(corpus.read_text().replace("Paris", "Parma"))
    with pytest.raises(ValueError, match=r"another corpus than .*c\.jsonl"):
        open_index(tmp_path / "index")


def test_index_and_corpus_move_together(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "data" / "index")
    os.rename(tmp_path / "data", tmp_path / "elsewhere")
    assert len(open_index(tmp_path / "elsewhere" / "index")) == 3


def test_the_same_corpus_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    one, other = (build(corpus, tmp_path / name) and tmp_path / name for name in ("one", "other"))
    files = sorted(file.relative_to(one) for file in one.rglob("*") if file.is_file())
    assert {file.suffix for file in files} == {".json", ".npy"}
    assert all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def test_what_is_no_index_is_not_replaced(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds something that is no index"):
        build(corpus, corpus.parent)
    assert corpus.exists()
    build(corpus, tmp_path / "index")
    build(corpus, tmp_path / "index")
    moved = corpus.rename(tmp_path / "index" / corpus.name)  # beside the index's own files
    with pytest.raises(ValueError, match="holds something that is no index"):
        build(moved, tmp_path / "index")
    assert moved.exists()


def test_a_damaged_corpus_leaves_no_index(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text() + '{"id": "9", "contents": "cut')
    with pytest.raises(ValueError, match=r"c\.jsonl, line 4: not a document"):
        build(corpus, tmp_path / "index")
    assert not (tmp_path / "index").exists()
    corpus.write_text("[" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1: not a document"):
        build(corpus, tmp_path / "index")


def test_half_a_surrogate_pair_in_an_id_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"id": "\\ud800", "contents": "Ulm\\nA city."}\n')
    assert [document.doc_id for document in read_corpus(file)] == ["?"]


def test_what_is_missing_or_cut_is_named(corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    build(corpus, index)
    whole = (index / "manifest.json").read_text()
    (index / "manifest.json").write_text(whole.replace('"bm25"', '"splade"'))
    with pytest.raises(ValueError, match=r"manifest\.json: kind: "):
        open_index(index)
    (index / "manifest.json").write_text(whole)
    np.save(index / "starts.npy", np.zeros(2, dtype=np.int64))
    with pytest.raises(ValueError, match=r"starts\.npy has 2 documents, manifest\.json 3"):
        open_index(index)
    corpus.unlink()
    with pytest.raises(FileNotFoundError, match=r"c\.jsonl"):
        open_index(index)
    shutil.rmtree(index)
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        open_index(index)


def test_only_dense_kinds_have_an_encoder(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--kind hybrid: needs an --encoder"):
        build(corpus, tmp_path / "index", "hybrid")


def test_a_retriever_knows_its_documents() -> None:
    documents = made([["ulm"], ["river"]])
    hits = Retriever(documents, BM25.build(documents)).find(["RIVER"], 5)[0]
    assert [hit.document for hit in hits] == documents[1:] and hits[0].score > 0

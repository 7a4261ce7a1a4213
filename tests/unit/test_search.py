"""The search tool: reading a corpus, BM25 in memory, and what an observation looks like."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mempo.config import Search
from mempo.search import NOTHING_FOUND, Document, LocalSearcher, Retriever, open_searcher, render
from mempo.search.bm25 import BM25, words
from mempo.search.corpus import contents, read_corpus
from tests.real_data import FOLDER

DOCUMENTS = [
    Document("0", "Ulm", "Ulm: country Germany, river Danube."),
    Document("1", "Paris", "Paris: country France, river Seine."),
    Document("2", "France", "France: capital Paris, currency Euro."),
    Document("3", "北京", "北京: 中国的首都。"),
]
REAL = FOLDER / "corpus" / "wiki18_sample_1000.jsonl"


def write_corpus(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


def ask(query: str, top_k: int = 1) -> str:
    return asyncio.run(LocalSearcher(Retriever(DOCUMENTS, BM25.build(DOCUMENTS)), top_k).search(query))


def test_from_a_file_to_an_observation(tmp_path: Path) -> None:
    rows = [{"id": d.doc_id, "contents": contents(d)} for d in DOCUMENTS]
    searcher = open_searcher(write_corpus(tmp_path / "corpus.jsonl", rows), Search(top_k=1))
    assert asyncio.run(searcher.search("currency of France")) == "France\nFrance: capital Paris, currency Euro."


def test_servers_of_a_host_may_have_several_paths() -> None:
    urls = ("http://a:65535/retrieve", "http://a:65535/e5/retrieve", "https://[::1]/retrieve", "http://A/retrieve")
    assert Search(urls=urls, corpus="c").urls == urls


def test_a_searcher_is_opened_once(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", [{"id": "0", "contents": "Ulm\nA city."}])
    searcher = open_searcher(corpus, Search())
    assert open_searcher(corpus, Search()) is searcher
    assert open_searcher(corpus, Search(top_k=2)) is not searcher


def test_top_k_documents_best_first() -> None:
    # "river" is in two documents, "Danube" in one of them
    assert ask("river Danube", top_k=4) == (
        "Ulm\nUlm: country Germany, river Danube.\nParis\nParis: country France, river Seine."
    )


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    twins = [Document(str(i), "Twin", "the same words") for i in range(20)]
    found = Retriever(twins, BM25.build(twins)).find(["same words", "twin"], 3)
    assert [[hit.document.doc_id for hit in hits] for hits in found] == [["0", "1", "2"]] * 2


@pytest.mark.parametrize("query", ["", "   ", "!!!", '"\n"', "zzz qqq", "</search>?"])
def test_nothing_in_common_is_nothing_found(query: str) -> None:
    assert ask(query) == NOTHING_FOUND


@pytest.mark.parametrize("query", ['"Ulm"', "Ulm\nUlm", "ULM?", "Ulm " * 2500, "'Ulm' \\ \x00", "Ulm\u0085\u2028"])
def test_odd_queries_find_the_document(query: str) -> None:
    assert ask(query).startswith("Ulm\n")


def test_scripts_without_blanks_match_by_character() -> None:
    assert words("中国的首都") == ["中", "国", "的", "首", "都"]
    assert ask("中国首都是哪里？").startswith("北京\n")


def test_documents_without_a_word_are_never_found() -> None:
    silent = [Document("0", "!", "?"), Document("1", "", "...")]
    assert Retriever(silent, BM25.build(silent)).find(["anything"], 2) == [[]]


def test_no_documents_is_said_so() -> None:
    assert render([]) == NOTHING_FOUND


def test_titles_quoted_and_not(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "contents": '"A "quoted" name"\nText\nof two lines'},
        {"id": "b", "contents": "Plain title\nText"},
        {"id": "c", "contents": "Title alone"},
    ]
    assert read_corpus(write_corpus(tmp_path / "c.jsonl", rows)) == [
        Document("7", 'A "quoted" name', "Text\nof two lines"),
        Document("b", "Plain title", "Text", quoted=False),
        Document("c", "Title alone", "", quoted=False),
    ]


@pytest.mark.skipif(not REAL.exists(), reason="the sample of wiki-18 is not here")
def test_rows_of_wiki_18_come_back_as_they_are() -> None:
    read = [{"id": document.doc_id, "contents": contents(document)} for document in read_corpus(REAL)]
    assert len(read) == 1000 and read == [json.loads(line) for line in REAL.read_bytes().splitlines()]


def test_only_a_line_break_ends_a_row(tmp_path: Path) -> None:
    rows = [{"id": "a", "contents": "T\nnext\u0085line\u2028para"}, {"id": "b", "contents": "T\n\ud800"}]
    path = tmp_path / "c.jsonl"
    path.write_text(f"{json.dumps(rows[0], ensure_ascii=False)}\n\n{json.dumps(rows[1])}\n", encoding="utf-8")
    assert [document.text for document in read_corpus(path)] == ["next\u0085line\u2028para", "?"]


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "b", "contents": "cut in',
        '{"id": "b"}',
        '{"id": "b", "contents": null}',
        '{"id": null, "contents": "T\\ntext"}',
        '{"id": "b", "contents": " "}',
        '["b", "T"]',
        "7",
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "a", "contents": "T\\ntext"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: "):
        read_corpus(path)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").touch()
    with pytest.raises(ValueError, match="no documents"):
        read_corpus(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"urls": ["http://a:1/retrieve"]}, r"search\.corpus: names what the servers"),
        ({"corpus": "wiki-18"}, r"search\.corpus: .*set both or neither"),
        ({"urls": ["http://a/retrieve"], "corpus": "c", "index": "i"}, r"search\.index: the servers"),
        ({"urls": "http://a/retrieve", "corpus": "c"}, r"search\.urls: expected a list"),
        ({"urls": ["http://a/retrieve"] * 2, "corpus": "c"}, r"search\.urls\.1: .*already"),
        ({"urls": ["http://a/retrieve", "http://A:80/retrieve"], "corpus": "c"}, r"search\.urls\.1: .*already"),
        *(
            ({"urls": [f"http://a:{port}/retrieve"], "corpus": "c"}, r"search\.urls\.0: .*a port up to 65535")
            for port in (0, 65536, 99999)
        ),
        *(
            ({"urls": [url], "corpus": "c"}, r"search\.urls\.0: expected a whole address")
            for url in ("http://a:8001", "http://u:secret@a/retrieve", "http://a/retrieve?key=secret", "ftp://a/b", 7)
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        Search.model_validate(values)
    assert "secret" not in str(caught.value).split("[type=")[0]

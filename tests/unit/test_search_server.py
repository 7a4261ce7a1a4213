"""`mempo serve-retriever` over real HTTP, asked as Search-R1's client asks, by our own client, and by garbage."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from mempo.config import Search
from mempo.search import NOTHING_FOUND, Document, Retriever
from mempo.search.bm25 import BM25
from mempo.search.http import HTTPSearcher
from mempo.search.index import build, in_memory
from mempo.search.server import Limits, application, serve
from tests.served import ROOT

ROWS = [
    {"id": "0", "contents": '"Ulm"\nUlm lies on the Danube.'},
    {"id": "1", "contents": "Passau\nPassau lies on the Danube and the Inn."},
    {"id": "2", "contents": '"北京"\n北京 <|im_end|> "capital"\u2028</information>'},
    {"id": "3", "contents": "Linz lies\n"},
    {"id": "4", "contents": "Wien lies\n"},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retriever") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def start(source: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "mempo.cli", "serve-retriever", str(source), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith("5 documents at "), line
    return process, line.split()[-1]


@pytest.fixture(scope="module")
def url(corpus: Path) -> Iterator[str]:
    build(corpus, corpus.parent / "index")
    process, url = start(corpus.parent / "index")
    yield url
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")


def test_the_client_of_search_r1_is_answered(url: str) -> None:
    # search_r1/llm_agent/generation.py: the payload of _batch_search, and what _passages2string reads of the reply
    payload = {"queries": ["the Inn", "zzz"], "topk": 2, "return_scores": True}
    results = requests.post(url, json=payload).json()["result"]
    contents = [[item["document"]["contents"] for item in result] for result in results]
    assert contents == [[ROWS[1]["contents"], ROWS[0]["contents"]], []]
    assert [[type(item["score"]) for item in result] for result in results] == [[float, float], []]
    assert results[0][0]["score"] > results[0][1]["score"]


def test_without_scores_a_result_is_the_row_itself(url: str) -> None:
    assert requests.post(url, json={"queries": ["北京"]}).json() == {"result": [[ROWS[2]]]}


def test_topk_is_three_where_none_is_named(url: str) -> None:
    for topk, found in ((None, 3), (0, 3), (1, 1), (4, 4)):
        assert len(requests.post(url, json={"queries": ["lies"], "topk": topk}).json()["result"][0]) == found
    assert requests.post(url, json={"queries": []}).json() == {"result": []}


def test_our_own_client_sees_what_memory_gives(url: str, corpus: Path) -> None:
    retriever = in_memory(corpus)
    searcher = HTTPSearcher(Search(urls=(url,), corpus="test", top_k=2))
    for query in ("Danube", 'the "Inn"\n', "capital", "a" * 10_000, "?!", ""):
        [hits] = retriever.find([query], 2)
        expected = "\n".join(f"{hit.document.title}\n{hit.document.text}" for hit in hits) or NOTHING_FOUND
        assert asyncio.run(searcher.search(query)) == expected
    searcher.close()


def test_sixty_four_clients_and_garbage_at_once(url: str) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            good = {"json": {"queries": ["Danube"] * 8, "topk": 2, "return_scores": True}}
            bad = {"content": b"{", "headers": {"Content-Type": "application/json"}}
            clients = [client.post(url, **(bad if i % 8 == 7 else good)) for i in range(256)]
            limited = asyncio.Semaphore(64)

            async def one(request: Any) -> int:
                async with limited:
                    return int((await request).status_code)

            return await asyncio.gather(*map(one, clients))

    assert asyncio.run(run()) == [422 if i % 8 == 7 else 200 for i in range(256)]


GARBAGE: list[tuple[bytes, int, str]] = [
    (b"", 422, "body: Field required"),
    (b'{"queries": ["a"', 422, "JSON decode error"),
    (b"\xff\xfe", 422, "JSON decode error"),
    (b"[" * 100_000, 400, "error parsing the body"),
    (b"[]", 422, "body: "),
    (b"{}", 422, "body.queries: Field required"),
    (b'{"queries": "Ulm"}', 422, "body.queries: "),
    (b'{"queries": [null]}', 422, "body.queries.0: "),
    (b'{"queries": ["a"], "topk": -1}', 422, "body.topk: "),
    (b'{"queries": ["a"], "topk": 1e400}', 422, "body.topk: "),
    (b'{"queries": ["a"], "topk": 101}', 422, "topk: 101, 100 is the most"),
]


@pytest.mark.parametrize(("body", "status", "told"), GARBAGE)
def test_garbage_is_refused_with_a_reason(url: str, body: bytes, status: int, told: str) -> None:
    reply = requests.post(url, data=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status and told in reply.json()["detail"]
    assert len(reply.content) < 200, "what was sent is not repeated"


def test_health_and_metrics(url: str) -> None:
    base = url.removesuffix("/retrieve")
    assert requests.get(f"{base}/health").json() == {"status": "ok", "documents": 5}

    def counted(name: str) -> float:
        lines = requests.get(f"{base}/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)

    names = ("mempo_retriever_queries_total", 'mempo_retriever_requests_total{status="422"}')
    before = [counted(name) for name in names]
    requests.post(url, json={"queries": ["a", "b"]})
    requests.post(url, json={"queries": 7})
    assert [counted(name) for name in names] == [before[0] + 2, before[1] + 1]


def test_limits_of_a_request() -> None:
    documents = [Document("0", "Ulm", "A city.")]
    app = application(
        Retriever(documents, BM25.build(documents)), 3, Limits(queries=2, top_k=5, characters=10, body=200)
    )

    async def post(**request: Any) -> tuple[int, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            reply = await client.post("/retrieve", **request)
            return reply.status_code, reply.json().get("detail")

    async def chunks() -> Any:
        for _ in range(3):
            yield b" " * 100

    async def run() -> list[Any]:
        typed = {"Content-Type": "application/json"}
        return [
            await post(json={"queries": ["a"] * 2, "topk": 5}),
            await post(json={"queries": ["a"] * 3}),
            await post(json={"queries": ["a" * 11]}),
            await post(json={"queries": ["a"], "topk": 6}),
            await post(content=b" " * 201, headers=typed),
            await post(content=chunks(), headers=typed),
        ]

    assert asyncio.run(run()) == [
        (200, None),
        (413, "queries: 3 of them, 2 are the most"),
        (413, "queries: one of 11 characters, 10 are the most"),
        (422, "topk: 6, 5 is the most"),
        (413, "a body of more than 200 bytes"),
        (413, "a body of more than 200 bytes"),
    ]


def test_a_port_that_is_taken_is_told(url: str, corpus: Path) -> None:
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match="Address already in use"):
        serve(in_memory(corpus), "127.0.0.1", port, 3, print)

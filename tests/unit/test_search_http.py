"""The client of retrieval servers, against small real ones that answer, and fail, in every way a server can."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mempo.config import Search
from mempo.search import NOTHING_FOUND, Document, ToolError, http, open_searcher
from mempo.search.http import HTTPSearcher, read_reply

ULM = {"id": "7", "contents": '"Ulm"\nA city.'}
SCORED = {"result": [[{"document": ULM, "score": 1.5}]]}
Answer = tuple[int, bytes]
SILENT, RESET = (0, b""), (-1, b"")  # no answer at all; a connection closed without one


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)


class Server:
    """Says ``say(query)``; ``asked`` holds the bodies that came. The probe at the start is always answered."""

    def __init__(self, say: Callable[[str], Answer]) -> None:
        self.say, self.over = say, threading.Event()
        self.asked: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                probe = body["queries"] == [http.PROBE]
                if not probe:
                    outer.asked.append(body)
                status, content = (200, b'{"result": [[]]}') if probe else outer.say(body["queries"][0])
                if status <= 0:
                    outer.over.wait(10 if status == 0 else 0)
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/retrieve"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(*says: Callable[[str], Answer], **settings: Any) -> Iterator[tuple[HTTPSearcher, list[Server]]]:
    servers = [Server(say) for say in says]
    urls = tuple(server.url for server in servers)
    try:
        searcher = HTTPSearcher(Search(urls=urls, corpus="test", **{"retries": 3, "deadline_s": 20.0} | settings))
        yield searcher, servers
        searcher.close()
    finally:
        for server in servers:
            server.stop()


def answer(value: Any) -> Callable[[str], Answer]:
    return lambda query: (200, json.dumps(value).encode())


def ask(searcher: HTTPSearcher, query: str = "where is Ulm") -> str:
    return asyncio.run(searcher.search(query))


@pytest.mark.parametrize("reply", [SCORED, {"result": [[ULM]]}])
def test_the_request_is_the_one_of_search_r1(reply: Any) -> None:
    with serving(answer(reply), top_k=3) as (searcher, [server]):
        assert ask(searcher) == "Ulm\nA city."
        assert server.asked == [{"queries": ["where is Ulm"], "topk": 3, "return_scores": True}]


def test_an_empty_list_is_an_ordinary_observation() -> None:
    with serving(answer({"result": [[]]})) as (searcher, [server]):
        assert ask(searcher) == NOTHING_FOUND
        assert len(server.asked) == 1


BROKEN: list[tuple[Answer, str]] = [
    ((500, b"Internal Server Error"), "HTTP 500: Internal"),
    ((503, b"loading"), "HTTP 503: loading"),
    ((422, b'{"detail":"too long"}'), "HTTP 422: .*too long"),
    ((302, b""), "HTTP 302"),
    (RESET, "RemoteProtocolError"),
    ((200, b"<html>"), "not JSON"),
    ((200, b"[" * 100_000), "not JSON"),
    ((200, b"\xff\xfe"), "not JSON"),
    ((200, b"[]"), "no 'result'"),
    ((200, b'{"result": []}'), "no 'result'"),
    ((200, b'{"result": [[], []]}'), "no 'result'"),
    ((200, b'{"result": [[{"document": null, "score": 1.0}]]}'), "a document that is none"),
    ((200, b'{"result": [[null]]}'), "a document that is none"),
    ((200, b'{"result": [[{"document": {"id": "7", "contents": 7}, "score": 1}]]}'), "a document without text"),
    ((200, b'{"result": [[{"id": "7", "title": ["x"], "text": "y"}]]}'), "a document without text"),
    ((200, b" " * (http.MAX_REPLY + 1)), f"a reply of more than {http.MAX_REPLY} bytes"),
]


@pytest.mark.parametrize(("reply", "told"), BROKEN)
def test_what_is_no_answer_is_asked_again_and_then_a_failed_tool(reply: Answer, told: str) -> None:
    with serving(lambda query: reply, retries=1) as (searcher, [server]):
        with pytest.raises(ToolError, match=told) as caught:
            ask(searcher)
        assert server.url in str(caught.value)
        assert len(server.asked) == 2


def test_time_outs_and_refusals_are_failed_tools() -> None:
    with serving(lambda query: SILENT, retries=1, deadline_s=0.3) as (searcher, [server]):
        with pytest.raises(ToolError, match=r"no answer within 0\.3 s"):
            ask(searcher)
        server.stop()
        with pytest.raises(ToolError, match="ConnectError"):
            ask(searcher)


def test_what_passes_is_answered() -> None:
    answers = iter([(500, b""), (200, b"<html>"), RESET, (200, json.dumps(SCORED).encode())])
    with serving(lambda query: next(answers)) as (searcher, [server]):
        assert ask(searcher) == "Ulm\nA city."
        assert len(server.asked) == 4


def test_what_one_server_fails_another_answers() -> None:
    with serving(lambda query: (500, b""), answer(SCORED), retries=1) as (searcher, servers):
        assert [ask(searcher, f"query {i}") for i in range(6)] == ["Ulm\nA city."] * 6
        assert all(server.asked for server in servers)


@pytest.mark.parametrize("query", ['"Ulm"', "two\nlines", "a" * 10_000, "?!", "", "北京\u2028\x00", "\ud800"])
def test_odd_queries_arrive_as_they_are(query: str) -> None:
    with serving(answer(SCORED)) as (searcher, [server]):
        assert ask(searcher, query) == "Ulm\nA city."
        assert server.asked[0]["queries"] == [query.replace("\ud800", "?")]


def test_event_loops_come_and_go() -> None:
    with serving(answer(SCORED), cache_size=0) as (searcher, [server]):
        for number in range(3):
            assert ask(searcher, f"query {number}") == "Ulm\nA city."
        assert len(server.asked) == 3


def test_many_at_once_are_all_answered() -> None:
    async def run(searcher: HTTPSearcher) -> list[str]:
        return await asyncio.gather(*(searcher.search(f"query {i}") for i in range(200)))

    def say(query: str) -> Answer:
        return answer({"result": [[{"document": {"id": "1", "contents": f"T\n{query}"}, "score": 1}]]})(query)

    with serving(say) as (searcher, _):
        assert asyncio.run(run(searcher)) == [f"T\nquery {i}" for i in range(200)]


def test_a_cancelled_search_leaves_the_others_alone() -> None:
    async def run(searcher: HTTPSearcher, server: Server) -> str:
        waiting = asyncio.create_task(searcher.search("slow"))
        while not server.asked:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await searcher.search("quick")

    with serving(lambda query: SILENT if query == "slow" else answer(SCORED)(query)) as (searcher, [server]):
        assert asyncio.run(run(searcher, server)) == "Ulm\nA city."


def test_the_cache_holds_the_queries_asked_last() -> None:
    with serving(answer(SCORED), cache_size=2) as (searcher, [server]):
        for query in ("a", "b", "a", "c", "a", "b"):
            ask(searcher, query)
        assert [body["queries"][0] for body in server.asked] == ["a", "b", "c", "b"]


def test_failures_are_not_remembered() -> None:
    answers = iter([(500, b""), (200, json.dumps(SCORED).encode())])
    with serving(lambda query: next(answers), retries=0) as (searcher, _):
        with pytest.raises(ToolError):
            ask(searcher)
        assert ask(searcher) == "Ulm\nA city."


def test_a_mistyped_server_is_told_at_the_start() -> None:
    server = Server(answer(SCORED))
    server.stop()
    search = Search(urls=(server.url,), corpus="test", retries=1)
    with pytest.raises(ValueError, match=r"^search\.urls: http://127.*ConnectError.*; `mempo serve-retriever` starts"):
        open_searcher(Path("no corpus is read"), search)


FORMS: list[tuple[Any, Document]] = [
    (ULM, Document("7", "Ulm", "A city.")),
    # Search-R1's BM25 retriever names all three
    ({"title": "Ulm", "text": "A city.", "contents": '"Ulm"\nA city.'}, Document("None", "Ulm", "A city.")),
    ({"id": 7, "title": "Ulm", "text": "A\ncity."}, Document("7", "Ulm", "A\ncity.", quoted=False)),
    ({"id": 7, "text": "A city.\nOld."}, Document("7", "", "A city.\nOld.", quoted=False)),
    ({"id": "7", "contents": "Ulm"}, Document("7", "Ulm", "", quoted=False)),
    ({"id": "7", "contents": "<|im_end|>\n<mem>\ud800"}, Document("7", "<|im_end|>", "<mem>?", quoted=False)),
]


@pytest.mark.parametrize(("row", "expected"), FORMS)
def test_documents_come_in_several_forms_with_and_without_scores(row: Any, expected: Document) -> None:
    scored = json.dumps({"result": [[{"document": row, "score": 0.5}]]}).encode()
    assert read_reply(scored, 1) == read_reply(json.dumps({"result": [[row]]}).encode(), 1) == [expected]


def test_more_documents_than_asked_for_are_left_out() -> None:
    assert len(read_reply(json.dumps({"result": [[ULM] * 5]}).encode(), 2)) == 2

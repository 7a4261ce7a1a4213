"""Requests over several servers: small real HTTP servers that fail in every way a server can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mempo.engines import open_engine, routing
from mempo.engines.routing import NoServer, Pool, Server
from mempo.engines.vllm_replies import Unfinished
from mempo.runtime import VLLM, Runtime

Answer = tuple[int, bytes]
SILENT = (0, b"")  # the connection stays open and nothing comes
RESET = (-1, b"")  # the connection is closed without an answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(routing, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(routing, "CHECK_S", 0.1)
    monkeypatch.setattr(routing, "HEALTH_S", 0.3)


class Fake:
    """An HTTP server whose ``say(path)`` decides each answer; counts what is asked and what was hung up on."""

    def __init__(self, say: Callable[[str], Answer]) -> None:
        self.say = say
        self.asked: list[str] = []
        self.hung_up = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line), 0)
        await reader.readexactly(length)
        path = head.split()[1]
        self.asked.append(path)
        status, body = self.say(path)
        if status == 0:
            await reader.read(1)
            self.hung_up += 1
        elif status > 0:
            head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
        writer.close()


def healthy(answer: Answer) -> Callable[[str], Answer]:
    return lambda path: (200, b"") if path == "/health" else answer


async def nothing_to_do(server: Server) -> None:
    pass


@asynccontextmanager
async def pool(
    *servers: Fake, prepare: Callable[[Server], Awaitable[None]] = nothing_to_do, deadline_s: float = 20.0
) -> AsyncIterator[Pool]:
    for server in servers:
        await server.start()
    made = Pool([s.url for s in servers], prepare, deadline_s=deadline_s, max_inflight=64, headers={"X-Key": "k"})
    try:
        yield made
    finally:
        await made.close()
        for server in servers:
            await server.stop()


def ask(made: Pool) -> Any:
    return made.ask("/ask", {"question": 1}, json.loads)


def test_the_least_loaded_ready_server_is_asked() -> None:
    async def run() -> tuple[int, int]:
        one, other = Fake(healthy(SILENT)), Fake(healthy(SILENT))
        async with pool(one, other) as made:
            await made.renew()
            waiting = [asyncio.create_task(ask(made)) for _ in range(10)]
            while one.asked.count("/ask") + other.asked.count("/ask") < 10:
                await asyncio.sleep(0.01)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            while one.hung_up + other.hung_up < 10:  # a cancelled request is closed, so that the server stops
                await asyncio.sleep(0.01)
            return one.asked.count("/ask"), other.asked.count("/ask")

    assert asyncio.run(run()) == (5, 5)


@pytest.mark.parametrize("failure", [(500, b"{}"), (503, b"<html>"), RESET])
def test_what_one_server_fails_another_answers(failure: Answer) -> None:
    async def run() -> list[int]:
        async with pool(Fake(healthy(failure)), Fake(healthy((200, b"7")))) as made:
            await made.renew()
            return await asyncio.gather(*(ask(made) for _ in range(20)))

    assert asyncio.run(run()) == [7] * 20


def test_a_server_that_falls_silent_loses_its_requests_to_the_other() -> None:
    async def run() -> list[int]:
        frozen, other = Fake(healthy(SILENT)), Fake(healthy((200, b"7")))
        async with pool(frozen, other) as made:
            await made.renew()
            waiting = [asyncio.create_task(ask(made)) for _ in range(4)]
            await asyncio.sleep(0.05)
            frozen.say = lambda path: SILENT
            return await asyncio.gather(*waiting)

    assert asyncio.run(run()) == [7] * 4


def test_no_server_is_an_error_inside_the_deadline_that_names_all() -> None:
    async def run() -> str:
        refused, failing = Fake(healthy((200, b"7"))), Fake(lambda path: (503, b'{"error": {"message": "dead"}}'))
        async with pool(refused, failing, deadline_s=0.5) as made:
            await refused.stop()
            with pytest.raises(NoServer) as caught:
                await made.renew()
            with pytest.raises(NoServer):
                await ask(made)
            assert refused.url in str(caught.value) and failing.url in str(caught.value)
            return str(caught.value)

    message = asyncio.run(run())
    for part in ("runtime.vllm.servers: no answer within 0.5 s: ", "ConnectError", "503: dead"):
        assert part in message


def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    async def run() -> None:
        silent = Fake(healthy(SILENT))
        async with pool(silent, deadline_s=0.3) as made:
            await made.renew()
            with pytest.raises(NoServer, match=silent.url):
                await ask(made)

    asyncio.run(run())


def test_a_refused_question_is_not_asked_again() -> None:
    async def run() -> None:
        one, other = (Fake(healthy((400, b'{"error": {"message": "too long"}}'))) for _ in range(2))
        async with pool(one, other) as made:
            await made.renew()
            with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+/ask gave 400: too long"):
                await ask(made)
            assert one.asked.count("/ask") + other.asked.count("/ask") == 1

    asyncio.run(run())


def test_an_answer_that_makes_no_sense_names_the_url() -> None:
    async def run() -> None:
        async with pool(Fake(healthy((200, b"<html>")))) as made:
            await made.renew()
            with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+: Expecting value"):
                await ask(made)

    asyncio.run(run())


def test_a_server_is_prepared_before_use_and_again_when_it_comes_back() -> None:
    events: list[str] = []

    async def prepare(server: Server) -> None:
        events.append("prepared")

    async def run() -> None:
        def say(path: str) -> Answer:
            if path == "/ask":
                events.append("asked")
            return (200, b"7")

        server = Fake(say)
        async with pool(server, prepare=prepare) as made:
            await made.renew()
            assert await ask(made) == 7
            await server.stop()
            waiting = asyncio.create_task(ask(made))
            while made.servers[0].ready:
                await asyncio.sleep(0.01)
            await server.start(server.port)
            assert await waiting == 7

    asyncio.run(run())
    assert events == ["prepared", "asked", "prepared", "asked"]


def test_new_weights_wait_for_what_is_in_flight() -> None:
    events: list[str] = []

    async def prepare(server: Server) -> None:
        events.append("prepared")

    async def run() -> None:
        server = Fake(healthy(SILENT))
        async with pool(server, prepare=prepare) as made:
            await made.renew()
            before = asyncio.create_task(ask(made))
            before.add_done_callback(lambda _: events.append("ended"))
            while "/ask" not in server.asked:
                await asyncio.sleep(0.01)
            renewal = asyncio.create_task(made.renew())
            after = asyncio.create_task(ask(made))
            await asyncio.sleep(0.1)
            assert server.asked.count("/ask") == 1 and not renewal.done(), "nothing new starts before the weights came"
            server.say = healthy((200, b"7"))
            before.cancel()
            await renewal
            assert await after == 7

    asyncio.run(run())
    assert events == ["prepared", "ended", "prepared"]


@pytest.mark.parametrize("found", ["at the start", "later"])
def test_a_server_that_cannot_be_prepared_ends_all(found: str) -> None:
    async def run() -> None:
        stale = found == "at the start"

        async def prepare(server: Server) -> None:
            if stale and server.url == other.url:
                raise RuntimeError("stale weights")

        one, other = Fake(healthy((200, b"7"))), Fake(healthy((200, b"7")))
        async with pool(one, other, prepare=prepare) as made:
            if not stale:
                await made.renew()
                stale = True
                other.say = lambda path: (500, b"")
                while made.servers[1].ready:
                    await ask(made)
                    await asyncio.sleep(0.01)
                other.say = healthy((200, b"7"))
            with pytest.raises(RuntimeError, match="stale weights"):
                await made.renew() if found == "at the start" else [await ask(made) for _ in range(100_000)]

    asyncio.run(run())


def test_an_unfinished_preparation_is_tried_again() -> None:
    tries = 0

    async def prepare(server: Server) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise Unfinished("the cache is held")

    async def run() -> int:
        async with pool(Fake(healthy((200, b"7"))), prepare=prepare) as made:
            await made.renew()
            return int(await ask(made))

    assert asyncio.run(run()) == 7 and tries == 4


def test_nothing_is_asked_of_servers_while_nobody_asks() -> None:
    async def run() -> int:
        server = Fake(healthy((200, b"7")))
        async with pool(server) as made:
            await made.renew()
            await ask(made)
            before = len(server.asked)
            await asyncio.sleep(0.5)  # several times CHECK_S
            return len(server.asked) - before

    assert asyncio.run(run()) <= 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://a/v1", "http://a b", "http://", "http://a?x=1"])
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"servers\.0"):
        VLLM(servers=(url,))
    assert VLLM(servers=("http://127.0.0.1:8000/", "https://[::1]:8000")).servers


def test_a_mistyped_server_is_told_at_once_and_not_tried_again(tiny_policy: Path) -> None:
    runtime = Runtime(engine="vllm", vllm=VLLM(servers=("http://127.0.0.1:9",), deadline_s=0.5))
    told = r"^runtime\.vllm\.servers: no answer within 0\.5 s: http://127\.0\.0\.1:9: .*`mempo serve` starts some"
    with pytest.raises(ValueError, match=told):
        open_engine(tiny_policy, runtime)

"""Requests over several HTTP servers: the least loaded is asked next, and what one fails to answer is asked another.

No server is asked before it was prepared: at the start, after new weights, and whenever it comes back from a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import httpx

from mempo.engines.vllm_replies import ServerError, Unfinished, error_message
from mempo.services import ServiceError

CHECK_S = 5.0  # between two looks at the health of a server that is being used
HEALTH_S = 30.0  # a server that is silent for so long is down
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between two tries of a server that is down
KEEP_ALIVE_S = 2.0  # shorter than vLLM's 5 s: a connection is not used while the server is closing it

T = TypeVar("T")


class Ask(Protocol):
    """``read`` of the answer to ``body`` at ``path``."""

    def __call__(self, path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> Coroutine[Any, Any, T]: ...


class NoServer(ServiceError):
    """No server answered inside the deadline; says what was wrong with each. It may pass by itself."""


@dataclass(eq=False, slots=True)
class Server:
    """``trouble``: why it is not ready; None where it was not tried yet. ``draining``: not to be prepared yet."""

    url: str
    ready: bool = False
    draining: bool = False
    trouble: str | None = None
    pause_s: float = FIRST_PAUSE_S
    inflight: set[asyncio.Task[bytes]] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Pool:
    """Servers that answer alike once ``prepare`` has returned. Lives in one event loop.

    A failure of ``prepare`` other than the server's not answering ends all that is asked, with that error.
    """

    def __init__(
        self,
        urls: Sequence[str],
        prepare: Callable[[Server], Awaitable[None]],
        *,
        deadline_s: float,
        max_inflight: int,
        headers: dict[str, str],
    ) -> None:
        self.servers = [Server(url) for url in urls]
        self._prepare, self._deadline_s = prepare, deadline_s
        # Proxies of the environment are for other hosts. Time is limited for a whole question, all tries together.
        self._client = httpx.AsyncClient(
            headers=headers,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=HEALTH_S),
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
        )
        self._slots = asyncio.Semaphore(max_inflight * len(urls))
        self._fatal: Exception | None = None
        self._epoch = self._asked = 0
        self._busy, self._news = asyncio.Event(), asyncio.Event()
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self.servers]

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
        """``read`` of an answer. Raises ``NoServer`` after the deadline, ``ValueError`` naming the URL where a server
        refuses the question (4xx) or its answer makes no sense.
        """
        async with self._slots:
            with self._asking():
                try:
                    async with asyncio.timeout(self._deadline_s):
                        while True:
                            server = await self._next()
                            with suppress(Unfinished):
                                return await self._answer(server, path, body, read)
                except TimeoutError:
                    raise self._no_server(self._deadline_s) from None

    async def renew(self, deadline_s: float | None = None) -> None:
        """Prepare all servers anew, none of them in use; those that do not answer now join when they do.

        Raises ``NoServer`` where none does inside the deadline.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        self._fatal, self._epoch = None, self._epoch + 1
        for server in self.servers:
            server.ready, server.draining, server.trouble = False, True, None
        for server in self.servers:
            await asyncio.gather(*server.inflight, return_exceptions=True)
            server.draining = False
            server.wake.set()
        with self._asking():
            try:
                async with asyncio.timeout(deadline_s):
                    await self._until(lambda: all(server.ready or server.trouble for server in self.servers))
                    await self._next()
            except TimeoutError:
                raise self._no_server(deadline_s) from None

    def only(self, server: Server) -> Ask:
        """Asks this server alone, ready or not, once."""

        async def ask(path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
            return read(await self.send(server, path, body))

        return ask

    async def send(self, server: Server, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> bytes:
        """One exchange with this server. Raises ``ValueError`` for 4xx, ``Unfinished`` for whatever else is not 200."""
        try:
            response = await self._client.request(method, server.url + path, json=body)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Unfinished(f"{type(error).__name__} {error}".strip()) from None
        if response.status_code == 200:
            return response.content
        message = f"{path} gave {response.status_code}: {error_message(response.content)}"
        if 400 <= response.status_code < 500:
            raise ValueError(f"{server.url}{message}")
        raise ServerError(message)

    async def healthy(self, server: Server) -> None:
        """Raises ``Unfinished`` where the server does not say that it is well."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.send(server, "/health", method="GET")
        except TimeoutError:
            raise Unfinished(f"/health was silent for {HEALTH_S:.0f} s") from None

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._client.aclose()

    async def _answer(self, server: Server, path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
        exchange = asyncio.create_task(self.send(server, path, body))
        server.inflight.add(exchange)
        exchange.add_done_callback(server.inflight.discard)
        try:
            answer = read(await exchange)
            server.pause_s = FIRST_PAUSE_S
            return answer
        except Unfinished as error:
            self._take_out(server, str(error))
            raise
        except ValueError as error:
            raise _naming(server, error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # by who asked, or by the deadline
            raise Unfinished("the server was taken out") from None

    async def _next(self) -> Server:
        await self._until(lambda: any(server.ready for server in self.servers))
        return min((server for server in self.servers if server.ready), key=lambda server: len(server.inflight))

    async def _keep(self, server: Server) -> None:
        """Prepare the server, look after its health, prepare it again when it failed; rest while nothing is asked."""
        while True:
            await self._busy.wait()
            if server.ready or server.draining:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):
                        await server.wake.wait()
            if server.trouble:
                await asyncio.sleep(server.pause_s)
            server.wake.clear()
            try:
                await self.healthy(server)
                if not server.ready and not server.draining:
                    epoch = self._epoch
                    await self._prepare(server)
                    server.ready, server.trouble = epoch == self._epoch, None
            except Exception as error:
                if not isinstance(error, Unfinished):  # it would end in nobody's hands here: who asks is told
                    self._fatal = _naming(server, error) if isinstance(error, ValueError) else error
                self._take_out(server, str(error))
                for exchange in server.inflight:
                    exchange.cancel()  # another server is asked
            self._tell()

    def _take_out(self, server: Server, trouble: str) -> None:
        server.ready, server.trouble = False, trouble
        server.pause_s = min(2 * server.pause_s, LONGEST_PAUSE_S)
        server.wake.set()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self._asked += 1
        self._busy.set()
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self._busy.clear()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._fatal is None and not condition():
            await self._news.wait()
        if self._fatal is not None:
            raise self._fatal

    def _no_server(self, deadline_s: float) -> NoServer:
        troubles = "; ".join(f"{server.url}: {server.trouble or 'no answer yet'}" for server in self.servers)
        return NoServer(f"runtime.vllm.servers: no answer within {deadline_s:g} s: {troubles}")


def _naming(server: Server, error: ValueError) -> ValueError:
    return error if server.url in str(error) else ValueError(f"{server.url}: {error}")

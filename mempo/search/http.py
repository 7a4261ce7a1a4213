"""The client of servers that speak Search-R1's retrieval protocol: its own, its forks', ``mempo serve-retriever``.

POST {"queries": [..], "topk": k, "return_scores": true} -> {"result": [[{"document": {..}, "score": s}, ..]]}
(github.com/PeterGriffinJin/Search-R1, search_r1/search/retrieval_server.py).
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
from typing import Any

import httpx

from mempo.config import Search
from mempo.engines.background import BackgroundLoop
from mempo.search import Document, ToolError, render
from mempo.search.corpus import from_contents, plain

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between two tries
KEEP_ALIVE_S = 2.0  # shorter than uvicorn's 5 s: a connection is not used while the server is closing it
MAX_INFLIGHT = 64  # requests at a time, for each server
MAX_REPLY = 2**22  # bytes: whoever sends more is no retrieval server
MAX_MESSAGE = 200
PROBE = "the"  # asked once at the start, of one server

logger = logging.getLogger(__name__)


class HTTPSearcher:
    """Asks the servers of ``search.urls`` in turn; what one does not answer, the next is asked after a pause.

    Its connections live in an event loop of their own, for the loops that ask come and go.
    """

    def __init__(self, config: Search) -> None:
        self._config = config
        self._servers = itertools.cycle(config.urls)
        self._known: dict[str, str] = {}  # the query asked longest ago stands first
        self._loop = BackgroundLoop("retrieval")
        self._loop.run(self._open())
        atexit.register(self.close)
        try:
            self._loop.run(self._ask(PROBE))
        except BaseException as error:
            self.close()
            if isinstance(error, ToolError):  # a mistyped URL more likely than a server that will come
                raise ValueError(f"search.urls: {error}; `mempo serve-retriever` starts one") from None
            raise

    async def search(self, query: str) -> str:
        """See ``Searcher``. May be awaited in any event loop."""
        return await self._loop.ask(self._search(query))

    def close(self) -> None:
        atexit.unregister(self.close)
        if not self._loop.closed:
            self._loop.run(self._client.aclose())
            self._loop.close()

    async def _open(self) -> None:
        # Proxies of the environment are for other hosts. Time is limited for a request as a whole.
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        self._client = httpx.AsyncClient(trust_env=False, timeout=None, limits=limits)
        self._slots = asyncio.Semaphore(MAX_INFLIGHT * len(self._config.urls))

    async def _search(self, query: str) -> str:
        observation = self._known.pop(query, None)
        if observation is None:
            observation = await self._ask(query)
        self._known[query] = observation
        if len(self._known) > self._config.cache_size:
            del self._known[next(iter(self._known))]
        return observation

    async def _ask(self, query: str) -> str:
        """Raises ``ToolError`` that names what was wrong with each server."""
        troubles: dict[str, str] = {}
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S))
            url = next(self._servers)
            try:
                async with self._slots, asyncio.timeout(self._config.deadline_s):
                    return render(read_reply(await self._send(url, query), self._config.top_k))
            except TimeoutError:
                troubles[url] = f"no answer within {self._config.deadline_s:g} s"
            except (httpx.HTTPError, httpx.StreamError, ValueError) as error:
                troubles[url] = f"{type(error).__name__} {error}".strip()
        message = "; ".join(f"{url}: {trouble}" for url, trouble in troubles.items())
        logger.warning("a search failed: %s", message)
        raise ToolError(message)

    async def _send(self, url: str, query: str) -> bytes:
        # With scores, as Search-R1's client asks: its server fails on requests without.
        body = {"queries": [plain(query)], "topk": self._config.top_k, "return_scores": True}
        content = bytearray()
        async with self._client.stream("POST", url, json=body) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MAX_REPLY:
                    raise ValueError(f"a reply of more than {MAX_REPLY} bytes")
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {content[:MAX_MESSAGE].decode(errors='replace')}")
        return bytes(content)


def read_reply(content: bytes, top_k: int) -> list[Document]:
    """At most ``top_k`` documents of a reply to one query, with scores or without. Raises ``ValueError``."""
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is not JSON: {error}") from None
    result = reply.get("result") if isinstance(reply, dict) else None
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise ValueError("the reply has no 'result' with one list for one query")
    return [_document(item) for item in result[0][:top_k]]


def _document(item: Any) -> Document:
    """From ``{"document": .., "score": ..}`` or the document itself: ``{"contents"}``, or ``{"title", "text"}``."""
    found = item.get("document", item) if isinstance(item, dict) else None
    if not isinstance(found, dict):
        raise ValueError("the reply has a document that is none")
    doc_id, told, title, text = (found.get(key) for key in ("id", "contents", "title", "text"))
    if isinstance(told, str) and told.strip():
        return from_contents(str(doc_id), told)
    if isinstance(text, str) and text.strip() and isinstance(title, str | None):
        return Document(str(doc_id), plain(title or ""), plain(text), quoted=False)
    raise ValueError("the reply has a document without text")

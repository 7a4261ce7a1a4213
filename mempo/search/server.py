"""A retrieval server that speaks Search-R1's protocol: POST /retrieve, and GET /health, GET /metrics.

Protocol and client: ``mempo.search.http``. A document is ``{"id", "contents"}`` as in wiki-18, its title quoted.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import prometheus_client as prometheus
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempo.search import Hit, Retriever
from mempo.search.corpus import contents

PATIENCE_S = 10  # for requests that are being answered when the server is told to end


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one request. Search-R1's client sends a training batch at once: thousands of queries of up to 500 tokens."""

    queries: int = 8192
    top_k: int = 100
    characters: int = 32_768
    body: int = 2**25


class Asked(BaseModel):
    queries: list[str]
    topk: Annotated[int, Field(ge=0)] | None = None
    return_scores: bool = False


class Meters:
    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "mempo_retriever_requests", "Requests to /retrieve", ["status"], registry=self.registry
        )
        self.queries = prometheus.Counter("mempo_retriever_queries", "Queries answered", registry=self.registry)
        self.seconds = prometheus.Histogram(
            "mempo_retriever_seconds", "Seconds of a request that was answered", registry=self.registry
        )


def application(retriever: Retriever, top_k: int, limits: Limits = Limits()) -> FastAPI:
    """The server; requests are answered in a pool of threads. ``top_k``: where a request names none."""
    app = FastAPI(title="mempo retriever", docs_url=None, redoc_url=None, openapi_url=None)
    meters = Meters()
    app.add_middleware(_BodyLimit, limit=limits.body)

    @app.post("/retrieve")
    def retrieve(asked: Asked) -> Response:
        started = time.perf_counter()
        _within(asked, limits)
        found = retriever.find(asked.queries, asked.topk or top_k)
        meters.queries.inc(len(asked.queries))
        meters.seconds.observe(time.perf_counter() - started)
        return JSONResponse({"result": [_result(hits, scores=asked.return_scores) for hits in found]})

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "documents": len(retriever)}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(prometheus.generate_latest(meters.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        # The reason alone: FastAPI's own answer repeats what was sent.
        problem = error.errors()[0]
        return JSONResponse({"detail": ".".join(map(str, problem["loc"])) + f": {problem['msg']}"}, 422)

    @app.middleware("http")
    async def counted(request: Request, answer: Callable[[Request], Any]) -> Response:
        response: Response = await answer(request)
        if request.url.path == "/retrieve":
            meters.requests.labels(str(response.status_code)).inc()
        return response

    return app


def serve(retriever: Retriever, host: str, port: int, top_k: int, say: Callable[[str], None]) -> None:
    """Answer until SIGTERM or Ctrl-C; requests in hand are finished. Port 0: any that is free. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=2048) as listener:
        config = uvicorn.Config(
            application(retriever, top_k),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=PATIENCE_S,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # uvicorn ends in order at a signal, then raises it once more
        shown = f"[{host}]" if ":" in host else host
        say(f"{len(retriever):,} documents at http://{shown}:{listener.getsockname()[1]}/retrieve")
        uvicorn.Server(config).run(sockets=[listener])


def _within(asked: Asked, limits: Limits) -> None:
    if len(asked.queries) > limits.queries:
        raise HTTPException(413, f"queries: {len(asked.queries)} of them, {limits.queries} are the most")
    longest = max(map(len, asked.queries), default=0)
    if longest > limits.characters:
        raise HTTPException(413, f"queries: one of {longest} characters, {limits.characters} are the most")
    if (asked.topk or 0) > limits.top_k:
        raise HTTPException(422, f"topk: {asked.topk}, {limits.top_k} is the most")


def _result(hits: Sequence[Hit], *, scores: bool) -> list[dict[str, Any]]:
    documents = [{"id": hit.document.doc_id, "contents": contents(hit.document)} for hit in hits]
    if not scores:
        return documents
    return [{"document": row, "score": hit.score} for row, hit in zip(documents, hits, strict=True)]


class _BodyLimit:
    """Refuses bodies of more than ``limit`` bytes, whether their length was told or not, before they are parsed."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise HTTPException(413, f"a body of more than {self._limit} bytes")
            return message

        await self._app(scope, counted, send)

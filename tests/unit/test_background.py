"""An event loop that outlives those that ask it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mempo.engines.background import BackgroundLoop


async def where() -> int:
    await asyncio.sleep(0)
    return threading.get_ident()


def test_it_is_asked_from_many_loops_and_from_none() -> None:
    loop = BackgroundLoop("test")
    threads = {asyncio.run(loop.ask(where())), asyncio.run(loop.ask(where())), loop.run(where())}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    loop.close()
    loop.close()


def test_errors_and_cancellations_arrive() -> None:
    loop = BackgroundLoop("test")
    seen: list[str] = []

    async def failing() -> None:
        raise ValueError("of the work")

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(ValueError, match="of the work"):
        asyncio.run(loop.ask(failing()))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(loop.ask(waiting()), 0.05))
    loop.close()
    assert seen == ["cancelled"]


def test_closing_tells_those_who_wait() -> None:
    loop = BackgroundLoop("test")

    async def asked() -> None:
        answer = asyncio.ensure_future(loop.ask(asyncio.Event().wait()))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(loop.close)
        await answer

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asked())

"""An event loop in a thread of its own: for what belongs to one loop and is asked from others, or from none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundLoop:
    """Lives until ``close``; the thread ends with the program at the latest."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for ``work`` here, whatever else this thread has to do; an interrupt of the wait ends the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def ask(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await ``work`` from another loop; a cancellation there reaches it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def cancel_all(self) -> None:
        """End what is going on; those who wait for it are told so."""
        self.run(_cancel_others())

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        if not self.closed:
            self.cancel_all()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

"""An event loop in a thread of its own, beside code that is not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from xinference_xavier.runtime.rollback import Rollback

Begin = Callable[[Rollback], Awaitable[Collection[asyncio.Task[None]]]]
"""Starts the tasks of the loop; the scope's undos run when the loop ends."""


class LoopThread:
    """The loop ends at `stop`, or when a task fails."""

    def __init__(self, name: str, begin: Begin) -> None:
        self._begin = begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._up = threading.Event()
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[None] | None = None

    def start(self, timeout: float) -> None:
        """Return when `begin` has returned. Raises what it raised, or TimeoutError."""
        self._thread.start()
        if not self._up.wait(timeout):
            raise TimeoutError(f"{self._thread.name} did not start within {timeout:g} s")
        if self._error is not None:
            raise self._error

    def stop(self, timeout: float) -> None:
        """Cancel the tasks and wait for the thread, `timeout` seconds at most."""
        if self._task is None:
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(timeout)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):  # `stop`
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with Rollback() as scope:  # never committed
            try:
                tasks = await self._begin(scope)
            except Exception as error:  # `start` raises it
                self._error = error
                return
            finally:
                self._up.set()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)

"""Undo a transaction's steps unless all of them succeed.

Life cycle: enter the scope, acquire, register the undo at once, and ``commit()`` last. A scope that
ends without a commit, by an exception or a cancellation, runs its undos in reverse order, each
within `UNDO_DEADLINE`. A failed undo is logged; it neither stops the others nor replaces the
original error.

Threading: a scope belongs to one asyncio task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from xinference_xavier.runtime.deadline import within

logger = logging.getLogger(__name__)

UNDO_DEADLINE = 5.0  # seconds


class Rollback:
    """One transaction's undo list, an asynchronous context manager::

    async with Rollback() as scope:
        actor = await create()
        scope.undo(destroy, actor)
        await rest_of_the_work(actor)
        scope.commit()
    """

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    def undo(self, action: Callable[..., object], *args: object) -> None:
        """Register ``action(*args)``, which may return an awaitable. A synchronous action must not
        block: it runs on the event loop."""
        self._stack.push_async_callback(self._run, action, args)

    def commit(self) -> None:
        """Drop the undos registered so far."""
        self._stack.pop_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In a task of its own: our cancellation, even a second one, must not reach the undos.
        unwinding = asyncio.ensure_future(self._stack.aclose())
        cancelled: asyncio.CancelledError | None = None
        while not unwinding.done():
            try:
                await asyncio.shield(unwinding)
            except asyncio.CancelledError as late:
                cancelled = late
        unwinding.result()
        # With an error, that one propagates already.
        if cancelled is not None and error is None:
            raise cancelled

    async def _run(self, action: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            outcome = action(*args)
            if inspect.isawaitable(outcome):
                await within(UNDO_DEADLINE, outcome)
        # A failed undo must neither stop the others nor hide the original error.
        except (Exception, asyncio.CancelledError) as error:
            name = getattr(action, "__qualname__", action)
            logger.warning("undo failed: action=%s error=%r", name, error)

"""Undo what was acquired, unless the whole succeeds.

Threading model: a scope belongs to one asyncio task. Life cycle: enter, acquire, register the undo
at once, ``commit()`` as the last step. Left without a commit, by an exception or a cancellation,
the scope runs its undos in reverse. Each has a deadline of its own (seconds); none stops the others
or replaces the error that caused the rollback: failures are logged and counted.
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

_DEFAULT_DEADLINE = 5.0


class Rollback:
    """One transaction's undo list, an asynchronous context manager::

    async with Rollback() as scope:
        actor = await create()
        scope.undo(destroy, actor)
        await rest_of_the_work(actor)
        scope.commit()
    """

    def __init__(self) -> None:
        self.failed_undos = 0
        self._stack = AsyncExitStack()

    def undo(
        self, action: Callable[..., object], *args: object, deadline: float = _DEFAULT_DEADLINE
    ) -> None:
        """Register ``action(*args)``; what it returns is awaited if it is awaitable.

        A synchronous action runs in the event loop and must not block: no deadline can stop it.
        """
        self._stack.push_async_callback(self._run, action, args, deadline)

    def commit(self) -> None:
        """Keep everything acquired so far. Undos registered later still count."""
        self._stack.pop_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A task of its own: a cancellation of ours, even a second one, must not reach the undos.
        unwinding = asyncio.ensure_future(self._stack.aclose())
        cancelled: asyncio.CancelledError | None = None
        while not unwinding.done():
            try:
                await asyncio.shield(unwinding)
            except asyncio.CancelledError as late:
                cancelled = late
        unwinding.result()
        # The first error is already on its way up; only without one is the late cancellation news.
        if cancelled is not None and error is None:
            raise cancelled

    async def _run(
        self, action: Callable[..., object], args: tuple[object, ...], deadline: float
    ) -> None:
        try:
            outcome = action(*args)
            if inspect.isawaitable(outcome):
                await within(deadline, outcome)
        # Whatever an undo raises must neither stop the others nor hide the first error.
        except (Exception, asyncio.CancelledError) as error:
            self.failed_undos += 1
            logger.warning("undo %s failed: %r", getattr(action, "__qualname__", action), error)

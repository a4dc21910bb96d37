"""Calls of actors that end in time whatever the other side does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_GRACE = 0.5
"""Seconds that an abandoned call gets to tell the other side that nobody waits any more."""


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Await `call`, but no longer than `seconds`; then raise TimeoutError.

    `asyncio.wait_for` is not enough: it waits for the cancelled call to end, and a cancelled
    xoscar call first asks the peer to cancel, without a deadline. A peer that is stopped or
    unreachable never answers, so the deadline would never come. Here the call is abandoned: it is
    cancelled in the background, twice, because the second time ends the asking too. Cancelling the
    caller abandons the call in the same way.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            _abandon(task)
    if task.cancelled() or not task.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()


def _abandon(task: asyncio.Future[Any]) -> None:
    task.add_done_callback(_retrieve)
    task.cancel()
    asyncio.get_running_loop().call_later(CANCEL_GRACE, task.cancel)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()

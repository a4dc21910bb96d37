"""Actor calls that end by their deadline, whatever the peer does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

import xoscar

from xinference_xavier.runtime.tasks import retrieve

T = TypeVar("T")

UNREACHABLE = (OSError, TimeoutError, xoscar.ActorNotExist, xoscar.ServerClosed)
"""What a call raises when its actor cannot be reached."""
CANCEL_GRACE = 0.5
"""Seconds in which an abandoned call can tell its peer that nobody waits for the answer."""


def remaining(deadline: float) -> float:
    """Seconds until `deadline` (`time.monotonic()`), but never 0, which often means no limit."""
    return max(0.001, deadline - time.monotonic())


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Await `call` for at most `seconds`; then raise TimeoutError.

    `asyncio.wait_for` is not enough: it waits for the cancelled call to end, and a cancelled
    xoscar call first asks the peer to cancel, without a deadline. Here the call is cancelled in the
    background, twice, because the second time also ends that question. Cancelling the caller
    abandons the call in the same way.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.add_done_callback(retrieve)
            task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_GRACE, task.cancel)
    if task.cancelled() or not task.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()

"""Background tasks of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

_running: set[asyncio.Future[Any]] = set()


def spawn(work: Awaitable[Any]) -> asyncio.Future[Any]:
    """Run `work` on the running loop; unlike asyncio, keep the task from being collected."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def retrieve(task: asyncio.Future[Any]) -> None:
    """As a done callback: keep asyncio from reporting an exception that nobody retrieved."""
    if not task.cancelled():
        task.exception()

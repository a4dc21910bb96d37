"""Streams of server-sent events, and one model's sharing as such a stream, which docs/api.md lists.

Threading: everything is on the API's event loop.
"""

import asyncio
import functools
import json
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import HTTPException
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.aio import UNREACHABLE, within
from xinference_xavier.serving import seam
from xinference_xavier.serving.gateway import DEADLINE, MayAsk, TrackerGateway

STATUS_INTERVAL = 1.0
RETRY_PAUSE = 1.0
MAX_RECENT = 100
"""Events sent at the start."""

MAX_LISTENERS = 100
MAX_LIFE = 600.0
"""Seconds. xinference asks for a listener's key or login only when a stream begins."""

Message = dict[str, str]
"""The arguments of `sse_starlette`: `event`, `data` and, for events, `id`."""

_LOOK = 0.25
"""Seconds between two looks whether the server drains."""

_servers = weakref.WeakSet[uvicorn.Server]()


class Listeners:
    """The open streams; only so many at a time."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Raises HTTPException if there are too many."""
        if self._count >= MAX_LISTENERS:
            raise HTTPException(503, f"{MAX_LISTENERS} streams are open; close another page first")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class Stream(EventSourceResponse):
    """An answer that may be endless. It ends after `MAX_LIFE`, and when the server drains: from 4.1
    on, xinference's waits for all connections to close before it gives way to another. Clients
    connect again, if they still may."""

    def __init__(self, listeners: Listeners, messages: AsyncIterator[Message]) -> None:
        super().__init__(limited(messages))
        self.headers["Connection"] = "close"
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._listeners.one_more():
            await super().__call__(scope, receive, send)


async def limited(messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
    coming: asyncio.Task[Message | None] | None = None
    loop = asyncio.get_running_loop()
    end = loop.time() + MAX_LIFE
    try:
        while loop.time() < end and not _drains():
            coming = coming or asyncio.ensure_future(anext(messages, None))
            await asyncio.wait({coming}, timeout=_LOOK)
            if coming.done():
                sent, coming = coming.result(), None
                if sent is None:
                    return
                yield sent
    finally:
        if coming is not None:
            coming.cancel()


def _drains() -> bool:
    return any(map(seam.drains, _servers))


def notice_servers() -> None:
    """Learn which servers run in this process from their ticks, ten a second: an application is not
    told. Idempotent."""
    original = uvicorn.Server.on_tick
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    async def on_tick(server: uvicorn.Server, counter: int) -> bool:
        ends = await original(server, counter)
        (_servers.discard if ends else _servers.add)(server)
        return ends

    uvicorn.Server.on_tick = on_tick  # type: ignore[method-assign, assignment]


async def live(trackers: TrackerGateway, model_uid: str, may_ask: MayAsk) -> AsyncIterator[Message]:
    available = True
    while True:
        try:
            async for sent in _session(trackers, model_uid, may_ask):
                available = True
                yield sent
        except NotFoundError as error:
            yield message("gone", {"detail": error.reason})
            return
        # A tracker that has ended may have a successor; if not, the next session finds out.
        except UNREACHABLE:
            if available:
                available = False
                detail = f"the tracker of {model_uid!r} does not answer"
                yield message("unavailable", {"detail": detail})
            await asyncio.sleep(RETRY_PAUSE)


async def _session(
    trackers: TrackerGateway, model_uid: str, may_ask: MayAsk
) -> AsyncIterator[Message]:
    """Ends with an error when the tracker stops answering."""
    tracker = await trackers.find(model_uid)
    yield message("history", await within(DEADLINE, tracker.history()))
    recent = (await within(DEADLINE, tracker.wait_events(0, 0.0)))[-MAX_RECENT:]
    last = 0
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        for number, event in recent:
            last = number
            yield message("event", event, str(number))
        left = due - loop.time()
        if left <= 0:
            due = loop.time() + STATUS_INTERVAL
            left = STATUS_INTERVAL
            # At most half an interval old, so that streams which share a report stay current.
            report = await trackers.shared_report(model_uid, STATUS_INTERVAL / 2)
            seen = report.seen_by(may_ask)
            yield await within(DEADLINE, asyncio.to_thread(message, "status", seen))
        recent = await within(left + DEADLINE, tracker.wait_events(last, left))


def message(event: str, data: dict[str, Any], number: str | None = None) -> Message:
    sent = {"event": event, "data": json.dumps(data, allow_nan=False)}
    return sent if number is None else sent | {"id": number}

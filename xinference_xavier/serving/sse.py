"""One model's sharing as server-sent events, which docs/api.md lists.

Threading: a stream is one generator on the API's event loop and has no task of its own.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import xoscar as xo
from fastapi import HTTPException

from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.deadline import within
from xinference_xavier.serving.tracker_gateway import DEADLINE, UNREACHABLE, TrackerGateway

STATUS_INTERVAL = 1.0
RETRY_PAUSE = 1.0
MAX_RECENT = 100
"""Events sent at the start."""

MAX_LISTENERS = 100

Message = dict[str, str]
"""For `sse_starlette`: `event`, `data` and, for events, `id`."""


class Listeners:
    """Of streams; only so many at a time."""

    def __init__(self) -> None:
        self._count = 0

    def check(self) -> None:
        """Raises HTTPException if there are too many."""
        if self._count >= MAX_LISTENERS:
            raise HTTPException(503, f"{MAX_LISTENERS} streams are open; close another page first")

    async def counted(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        self._count += 1
        try:
            async for sent in messages:
                yield sent
        finally:
            self._count -= 1


async def live(trackers: TrackerGateway, model_uid: str) -> AsyncIterator[Message]:
    available = True
    while True:
        try:
            async for sent in _session(trackers, model_uid):
                available = True
                yield sent
        except NotFoundError as error:
            yield message("gone", {"detail": error.reason})
            return
        # A tracker that has ended may have a successor; if not, the next session finds out.
        except (*UNREACHABLE, xo.ActorNotExist):
            if available:
                available = False
                detail = f"the tracker of {model_uid!r} does not answer"
                yield message("unavailable", {"detail": detail})
            await asyncio.sleep(RETRY_PAUSE)


async def _session(trackers: TrackerGateway, model_uid: str) -> AsyncIterator[Message]:
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
            yield message("status", report)
        recent = await within(left + DEADLINE, tracker.wait_events(last, left))


def message(event: str, data: dict[str, Any], number: str | None = None) -> Message:
    sent = {"event": event, "data": json.dumps(data, allow_nan=False)}
    return sent if number is None else sent | {"id": number}

"""What happened to a model's sharing of late, numbered, for those who want to hear of it.

Events are dictionaries, as `xinference_xavier.events` makes them. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from typing import Any, NamedTuple

from xinference_xavier.events import check_event
from xinference_xavier.protocol.tracker import MAX_REPORTED

MAX_EVENTS = 200


class EventRecord(NamedTuple):
    number: int
    event: dict[str, Any]


class EventLog:
    """The last `MAX_EVENTS` events. `refused` counts reports of what is none."""

    def __init__(self) -> None:
        # Above all numbers of a log before this one, so that its readers miss nothing here.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._events: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self._added = asyncio.Event()
        self.refused = 0

    def add(self, event: dict[str, Any]) -> None:
        """Once: a report whose answer was lost comes again."""
        if any(event == known for _, known in self._events):
            return
        self._events.append(EventRecord(next(self._numbers), event))
        self._added.set()
        self._added = asyncio.Event()

    def add_reported(self, events: object) -> None:
        """Of a peer, which is a member also if they are none."""
        if not isinstance(events, tuple) or len(events) > MAX_REPORTED:
            self.refused += 1
            return
        for event in events:
            try:
                check_event(event)
            except ValueError:
                self.refused += 1
            else:
                self.add(event)

    def since(self, number: int) -> list[EventRecord]:
        """Those after `number`, the oldest first."""
        return [happened for happened in self._events if happened.number > number]

    async def wait_since(self, number: int, timeout: float) -> list[EventRecord]:
        """Like `since`, at once if there are any, else when there are or after `timeout`."""
        if not self.since(number):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._added.wait()
        return self.since(number)

    def wake(self) -> None:
        """Let those go who wait."""
        self._added.set()

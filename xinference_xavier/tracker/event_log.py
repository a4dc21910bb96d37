"""The latest events of a model's sharing, numbered, for readers that wait for new ones.

Events are dictionaries as `xinference_xavier.events` makes them. Runs on the tracker's event loop.
"""

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
    """The last `MAX_EVENTS` events. `refused` counts malformed reports."""

    def __init__(self) -> None:
        # Above all numbers of earlier logs, so that their readers miss no event of this one.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._records: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self._added = asyncio.Event()
        self.refused = 0

    def add(self, event: dict[str, Any]) -> None:
        """Add `event` unless it is there: a report is repeated if its answer was lost."""
        if any(event == record.event for record in self._records):
            return
        self._records.append(EventRecord(next(self._numbers), event))
        self.wake()
        self._added = asyncio.Event()

    def add_reported(self, events: object) -> None:
        """Add the events of a replica, which stays a member even if they are malformed."""
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
        """The events after `number`, oldest first."""
        return [record for record in self._records if record.number > number]

    async def wait_since(self, number: int, timeout: float) -> list[EventRecord]:
        """Like `since`; if there are none, wait up to `timeout` seconds for one."""
        if not self.since(number):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._added.wait()
        return self.since(number)

    def wake(self) -> None:
        """Release the waiting readers."""
        self._added.set()

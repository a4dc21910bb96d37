"""What happened to a model's sharing of late, numbered, for those who want to hear of it.

An event is a dictionary: `event`, the name of a class of `hooks`, and that class's fields. Belongs
to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from xinference_xavier import hooks
from xinference_xavier.checks import shown

MAX_EVENTS = 200
MAX_REPORTED = 100
"""That a replica reports at a time."""
MAX_EVENT_BYTES = 4096
"""As JSON."""


class Happened(NamedTuple):
    number: int
    event: dict[str, Any]


def event_dict(event: hooks.Event) -> dict[str, Any]:
    """JSON-able."""
    return {"event": type(event).__name__, **asdict(event)}


def check_event(event: object) -> None:
    """Of a peer. Raises ValueError."""
    if not isinstance(event, Mapping):
        raise ValueError(f"event={shown(event)} is not a dictionary")
    kind, when = event.get("event"), event.get("time")
    known = getattr(hooks, kind, None) if isinstance(kind, str) else None
    if not isinstance(known, type) or not issubclass(known, hooks.Event):
        raise ValueError(f"event={shown(kind)} is none")
    if not isinstance(when, float) or not abs(when) < math.inf:
        raise ValueError(f"time={shown(when)} is not a number of seconds")
    try:
        size = len(json.dumps(event, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"event={kind} cannot be written as JSON: {error}") from None
    if size > MAX_EVENT_BYTES:
        raise ValueError(f"event={kind} takes {size} bytes, more than {MAX_EVENT_BYTES}")


class EventLog:
    """The last `MAX_EVENTS` events. `refused` counts reports of what is none."""

    def __init__(self) -> None:
        # Above all numbers of a log before this one, so that its readers miss nothing here.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._events: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._added = asyncio.Event()
        self.refused = 0

    def add(self, event: dict[str, Any]) -> None:
        """Once: a report whose answer was lost comes again."""
        if any(event == known for _, known in self._events):
            return
        self._events.append(Happened(next(self._numbers), event))
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

    def since(self, number: int) -> list[Happened]:
        """Those after `number`, the oldest first."""
        return [happened for happened in self._events if happened.number > number]

    async def wait_since(self, number: int, timeout: float) -> list[Happened]:
        """Like `since`, at once if there are any, else when there are or after `timeout`."""
        if not self.since(number):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._added.wait()
        return self.since(number)

    def wake(self) -> None:
        """Let those go who wait."""
        self._added.set()

"""What happened to a model's replicas, and the latest events of its sharing.

`Membership` is who joined, left and returned. `EventLog` numbers the events for readers that ask
for new ones. `call_hook` waits for them.

Runs on the tracker's event loop, the operator's function on a thread. Bounded: the oldest entries
are dropped.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from typing import Any, NamedTuple

from cachetools import LRUCache

from xinference_xavier.events import (
    Event,
    Hook,
    ReplicaJoined,
    ReplicaLost,
    ReplicaRecovered,
    event_dict,
    read_event,
)
from xinference_xavier.limits import LIMIT
from xinference_xavier.protocol.tracker import MAX_REPORTED, Member
from xinference_xavier.runtime.aio import DaemonThreads
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


class Membership:
    """Turns joins and losses into events. A replica keeps its name over its incarnations; without a
    name it goes by its incarnation."""

    def __init__(self, model_uid: str) -> None:
        self._model_uid = model_uid
        self._names: LRUCache[str, str] = LRUCache(LIMIT)  # by incarnation
        self._lost: LRUCache[str, str] = LRUCache(LIMIT)  # incarnations, by name

    def joined(self, name: str, member: Member) -> Event | None:
        """The event to report; None for a member that only renews or changes its namespace."""
        incarnation = member.incarnation
        name = name or incarnation
        has_joined = self._names.get(incarnation) == name
        self._names[incarnation] = name
        if self._lost.pop(name, None) is not None:
            event: type[ReplicaJoined | ReplicaRecovered] = ReplicaRecovered
        elif has_joined:
            return None
        else:
            event = ReplicaJoined
        return event(
            model_uid=self._model_uid,
            replica=name,
            incarnation=incarnation,
            address=member.address,
        )

    def name_of(self, incarnation: str) -> str:
        return self._names.get(incarnation, incarnation)

    def lost(self, incarnation: str) -> Event:
        name = self.name_of(incarnation)
        self._lost[name] = incarnation
        return ReplicaLost(model_uid=self._model_uid, replica=name, incarnation=incarnation)


MAX_EVENTS = 200


class EventRecord(NamedTuple):
    """`event` is in its JSON form."""

    number: int
    event: dict[str, Any]


class EventLog:
    """The last `MAX_EVENTS` events."""

    def __init__(self) -> None:
        # Above all numbers of earlier logs, so that their readers miss no event of this one.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._records: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self._added = asyncio.Event()
        self._log = RateLimitedLog(logger)

    def add(self, event: Event) -> None:
        """Add `event` unless it is there: a report is repeated if its answer was lost."""
        plain = event_dict(event)
        if any(plain == record.event for record in self._records):
            return
        self._records.append(EventRecord(next(self._numbers), plain))
        self._added.set()

    def add_reported(self, events: object) -> None:
        """Add the events of a replica, which stays a member even if they are malformed."""
        if not isinstance(events, tuple) or len(events) > MAX_REPORTED:
            self._log.warn("report", "a replica's events are no tuple of up to %d", MAX_REPORTED)
            return
        for event in events:
            try:
                self.add(read_event(event))
            except ValueError:
                self._log.warn("event", "an event of a replica is malformed: %.200r", event)

    def since(self, number: int) -> list[EventRecord]:
        """The events after `number`, oldest first."""
        return [record for record in self._records if record.number > number]

    async def wait_since(self, number: int) -> list[EventRecord]:
        """The same, once there is one."""
        while not (found := self.since(number)):
            self._added.clear()
            await self._added.wait()
        return found


async def call_hook(hook: Hook, log: EventLog) -> None:
    """Call the operator's function with each event, one after the other. If it is so slow that an
    event leaves the log meanwhile, it misses that one."""
    loop, thread, last = asyncio.get_running_loop(), DaemonThreads(1, "xavier-hook"), 0
    try:
        while True:
            for record in await log.wait_since(last):
                last = record.number
                await loop.run_in_executor(thread, _call, hook, read_event(record.event))
    finally:
        thread.shutdown()


def _call(hook: Hook, event: Event) -> None:
    try:
        hook(event)
    except (Exception, SystemExit):
        logger.exception("xavier_hooks failed: event=%s", event)

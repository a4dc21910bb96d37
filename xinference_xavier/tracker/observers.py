"""What routers learn of a model: the index of its largest namespace and the loads of all replicas.

Runs on the tracker's event loop. A router is not a member: it holds nothing, and the tracker keeps
no state for it. Every report of a load gets the next version number, so that a router receives only
what is new.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import NamedTuple, TypeVar

from xinference_xavier.limits import LIMIT
from xinference_xavier.protocol.load import Load, Observation, ReplicaLoad, RequestReport
from xinference_xavier.tracker.namespaces import Namespaces, WatcherBatcher

MAX_REQUEST_BYTES = 16 << 20
"""Most bytes of the remembered reports of requests."""
_REQUEST_BYTES = 1000
"""Bytes that a report counts for, in addition to its keys."""


_T = TypeVar("_T")


class _Reported(NamedTuple):
    version: int
    at: float
    load: Load


class Loads:
    def __init__(self) -> None:
        # Higher than any number of an earlier tracker, so that a router notices a new one.
        self.version = self._first = time.time_ns()
        self._latest: dict[str, _Reported] = {}
        self._gone: deque[tuple[int, str]] = deque(maxlen=LIMIT)
        self._requests: deque[tuple[int, RequestReport]] = deque()
        self._request_bytes = 0
        self.draining: dict[str, float] = {}
        """The time at which each drain ends, by incarnation."""

    def report(
        self, incarnation: str, load: Load, requests: Iterable[RequestReport], now: float
    ) -> None:
        self.version += 1
        self._latest[incarnation] = _Reported(self.version, now, load)
        for report in requests:
            self._requests.append((self.version, report))
            self._request_bytes += _REQUEST_BYTES + len(report.keys)
        while self._request_bytes > MAX_REQUEST_BYTES:
            _, oldest = self._requests.popleft()
            self._request_bytes -= _REQUEST_BYTES + len(oldest.keys)

    def drain(self, incarnation: str, until: float | None) -> bool:
        """Note until when a replica drains; None ends it. False if only the time is new."""
        changed = (incarnation in self.draining) is (until is None)
        if until is None:
            self.draining.pop(incarnation, None)
        else:
            self.draining[incarnation] = until
        if changed and (reported := self._latest.get(incarnation)) is not None:
            self.version += 1
            self._latest[incarnation] = reported._replace(version=self.version)
        return changed

    def latest(self, incarnation: str) -> Load | None:
        """A replica's latest load; None before its first report."""
        reported = self._latest.get(incarnation)
        return None if reported is None else reported.load

    @property
    def routing(self) -> str:
        """The mode with which the replicas were launched; empty before their first report."""
        return next((each.load.serving.routing for each in self._latest.values()), "")

    def drain_s(self, incarnation: str) -> float:
        """Seconds that a replica may drain; 0 before its first report."""
        load = self.latest(incarnation)
        return 0.0 if load is None else load.serving.drain

    def forget(self, incarnation: str) -> None:
        self.draining.pop(incarnation, None)
        if self._latest.pop(incarnation, None) is not None:
            self.version += 1
            self._gone.append((self.version, incarnation))

    def since(self, seen: int, name_of: Callable[[str], str], now: float) -> Observation:
        """What is newer than version `seen`; everything if that is of another tracker. The index is
        left out."""
        complete = not self._first <= seen <= self.version
        seen = 0 if complete else seen
        loads = tuple(
            ReplicaLoad(
                incarnation,
                name_of(incarnation),
                max(0.0, now - each.at),
                each.load,
                incarnation in self.draining,
            )
            for incarnation, each in self._latest.items()
            if each.version > seen
        )
        gone = () if complete else _newer(self._gone, seen)
        return Observation(None, self.version, complete, loads, gone, _newer(self._requests, seen))


def _newer(told: deque[tuple[int, _T]], seen: int) -> tuple[_T, ...]:
    newest_first = takewhile(lambda item: item[0] > seen, reversed(told))
    return tuple(each for _, each in newest_first)[::-1]


LISTENS_FOR = 10.0
"""Seconds after its last call in which a router is expected to call again."""
_COUNTED_AS = 20
"""Watchers: a router learns of changes every 10 ms at most."""
_ROUTER = "\0"  # the name of no replica


class Observers:
    def __init__(
        self,
        namespaces: Namespaces,
        name_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespaces = namespaces
        self._name_of = name_of
        self._clock = clock
        self.loads = Loads()
        self._batcher = WatcherBatcher()
        self._waiting = 0
        self._listened = -LISTENS_FOR
        self._ended = False
        namespaces.on_change = self._changed

    @property
    def listening(self) -> bool:
        """True if there is a router."""
        return self._waiting > 0 or self._clock() < self._listened + LISTENS_FOR

    def report(self, incarnation: str, load: Load, requests: Iterable[RequestReport]) -> None:
        # Nobody waits for these without a router. They may be long.
        heard = requests if self.listening else ()
        self.loads.report(incarnation, load, heard, self._clock())
        self._changed()

    def drain(self, incarnation: str, until: float | None) -> bool:
        """Tell routers that the replica gets no requests until then, or with None, that it gets
        them again. False if they know."""
        changed = self.loads.drain(incarnation, until)
        if changed:
            self._changed()
        return changed

    def extend_drains(self, seconds: float) -> None:
        for incarnation, until in self.loads.draining.items():
            self.loads.draining[incarnation] = until + seconds

    def expire_drains(self, now: float) -> list[str]:
        """Return the incarnations that get requests again, because nobody drains them any more."""
        drains = self.loads.draining.items()
        expired = [incarnation for incarnation, until in drains if until <= now]
        for incarnation in expired:
            self.drain(incarnation, None)
        return expired

    def forget(self, incarnation: str) -> None:
        self.loads.forget(incarnation)
        self._changed()

    def _changed(self) -> None:
        if self.listening:
            self._batcher.notify(_COUNTED_AS)

    async def wait(self, epoch: str, revision: int, version: int, timeout: float) -> Observation:
        """See `BlockTracker.observe`."""
        self._waiting += 1
        try:
            await self._batcher.wait_for(lambda: self._has_news(epoch, revision, version), timeout)
        finally:
            self._waiting -= 1
            self._listened = self._clock()
        found = self._namespaces.largest()
        update = None if found is None else found.journal.changes_since(epoch, revision, _ROUTER)
        news = self.loads.since(version, self._name_of, self._clock())
        return news._replace(update=update)

    def _has_news(self, epoch: str, revision: int, version: int) -> bool:
        found = self._namespaces.largest()
        changed = found is not None and found.journal.has_update(_ROUTER, epoch, revision)
        return self._ended or changed or self.loads.version != version

    def end(self) -> None:
        """Release all that wait."""
        self._ended = True
        self._batcher.notify_now()

"""When the replicas that watch a namespace are answered, and how many may wait. For one event loop.

A change after a quiet time is sent at once. Changes soon after it wait for the rest of that time
and are sent together. A single change travels as fast as it can, and under load each answer carries
more: an answer costs the tracker far more than the keys in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator

from xinference_xavier.errors import shown
from xinference_xavier.protocol.tracker import TrackerFullError
from xinference_xavier.tracker.index import MAX_MEMBERS

SPACING_PER_WATCHER = 0.0005
"""Seconds, times the watchers, between two times that they look. Twice what an answer costs the
tracker (0.25 ms of its loop), so that watchers take at most half of its time, and those who publish
find it free, however many there are: 16 learn of a change within 8 ms, 64 within 32."""
MAX_WATCHES = 4 * MAX_MEMBERS
"""That wait at a time; a member has one, and for a moment those that it gave up."""
MAX_WATCH = 60.0
"""Seconds that a watch waits at most, whatever it asks for."""


class WatcherBatcher:
    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._told_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> bool:
        """There is some that waits for more."""
        return self._timer is not None

    def notify(self, watchers: int) -> None:
        """Wake the watchers, rate-limited by how many there are."""
        if self._timer is None:
            at = self._told_at + SPACING_PER_WATCHER * watchers
            self._timer = asyncio.get_running_loop().call_at(at, self.notify_now)

    def notify_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_at = asyncio.get_running_loop().time()
        self._told.set()
        self._told = asyncio.Event()  # for those that come later

    async def wait(self, timeout: float) -> None:
        """For the next time that news is told, `timeout` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._told.wait()


class WatchLimit:
    """`count` wait now, `refused` were too many."""

    def __init__(self) -> None:
        self.count = 0
        self.refused = 0

    @contextlib.contextmanager
    def one_more(self, timeout: float) -> Iterator[float]:
        """It may wait for as many seconds as this gives. Raises ValueError, TrackerFullError."""
        if not isinstance(timeout, (int, float)) or not abs(timeout) < math.inf:
            raise ValueError(f"timeout={shown(timeout)} is not a number of seconds")
        if self.count >= MAX_WATCHES:
            self.refused += 1
            raise TrackerFullError(f"{MAX_WATCHES} watches wait for news of this model already")
        self.count += 1
        try:
            yield max(0.0, min(timeout, MAX_WATCH))
        finally:
            self.count -= 1

"""When watching replicas get their updates, and how many may watch. Runs on one event loop.

A change after a quiet time is sent at once. Changes soon after it wait for the rest of that time
and are sent together: sending an update costs the tracker far more than the keys in it.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator

from xinference_xavier.errors import shown
from xinference_xavier.protocol.tracker import TrackerFullError
from xinference_xavier.tracker.index import MAX_MEMBERS

SPACING_PER_WATCHER = 0.0005
"""Seconds between two notifications, for each watcher. Twice what an update costs the tracker's
loop (0.25 ms), so that watchers take at most half of it and publishers find it free: 16 watchers
learn of a change within 8 ms, 64 within 32."""
MAX_WATCHES = 4 * MAX_MEMBERS
"""Concurrent watches. Each member has one, and for a moment those that it has abandoned."""
MAX_WATCH = 60.0
"""A watch waits at most this many seconds, whatever it asks for."""


class WatcherBatcher:
    """Notifies the watchers of one namespace, rate-limited by how many there are."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()
        self._notified_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> bool:
        """Whether a change is held back for further ones."""
        return self._timer is not None

    def notify(self, watchers: int) -> None:
        """Wake the watchers as soon as their number allows."""
        if self._timer is None:
            at = self._notified_at + SPACING_PER_WATCHER * watchers
            self._timer = asyncio.get_running_loop().call_at(at, self.notify_now)

    def notify_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._notified_at = asyncio.get_running_loop().time()
        self._notified.set()
        self._notified = asyncio.Event()  # for the next notification

    async def wait(self, timeout: float) -> None:
        """Wait for the next notification, for at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._notified.wait()


class WatchLimit:
    """`count` watches wait now; `refused` counts those beyond `MAX_WATCHES`."""

    def __init__(self) -> None:
        self.count = 0
        self.refused = 0

    @contextlib.contextmanager
    def admit(self, timeout: float) -> Iterator[float]:
        """Count one more watch, and yield the seconds that it may wait. Raises ValueError for an
        invalid `timeout`, TrackerFullError beyond the limit."""
        if not isinstance(timeout, (int, float)) or not abs(timeout) < math.inf:
            raise ValueError(f"timeout={shown(timeout)} is not a number of seconds")
        if self.count >= MAX_WATCHES:
            self.refused += 1
            raise TrackerFullError(
                f"{MAX_WATCHES} watches of this model are open; find the client that opens them"
            )
        self.count += 1
        try:
            yield max(0.0, min(timeout, MAX_WATCH))
        finally:
            self.count -= 1

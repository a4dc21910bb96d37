"""When those who watch a namespace look again. For one event loop, the tracker's.

News that comes after a quiet time is told at once; what comes soon after it waits for the rest of
that time and is told together. So the way of a single change is as short as it can be, and under
load everybody gets more at a time instead of more often: an answer costs the tracker far more than
the keys in it.
"""

from __future__ import annotations

import asyncio
import contextlib

SPACING_PER_WATCHER = 0.0005
"""Seconds, times the watchers, between two times that they look. Twice what an answer costs the
tracker (0.25 ms of its loop), so that watchers take at most half of its time, and those who publish
find it free, however many there are: 16 learn of a change within 8 ms, 64 within 32."""


class News:
    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._told_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_back(self) -> bool:
        """There is some that waits for more."""
        return self._timer is not None

    def tell(self, watchers: int) -> None:
        """Let all that wait look again, as soon as may be with this many of them."""
        if self._timer is None:
            at = self._told_at + SPACING_PER_WATCHER * watchers
            self._timer = asyncio.get_running_loop().call_at(at, self.tell_now)

    def tell_now(self) -> None:
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

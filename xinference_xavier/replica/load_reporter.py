"""Tells the tracker the replica's load: with each heartbeat, and at once when it changes much while
there is a router.

Threading: on the event loop of the tracker's client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from xinference_xavier.protocol.load import Load, ScheduledPrompt
from xinference_xavier.replica.publisher import Call

logger = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two reports of a load that takes its course."""
_LOOK = 0.05
"""Seconds between two looks while there is a router."""
_MUCH = 0.25
_LITTLE = 0.05  # seconds that are never much


class Source(Protocol):
    def load(self) -> Load | None:
        """None while the engine starts."""

    def take_prompts(self) -> tuple[ScheduledPrompt, ...]: ...


async def _at_once() -> None:
    pass


class LoadReporter:
    """Reports nothing until `ready` returns: the replica takes requests from then on."""

    def __init__(
        self,
        source: Source,
        clock: Callable[[], float] = time.monotonic,
        ready: Callable[[], Awaitable[object]] = _at_once,
    ) -> None:
        self._source = source
        self._ready = ready
        self._clock = clock
        self._failed = False

    async def run(self, call: Call) -> None:
        """Report until cancelled."""
        await self._ready()
        reported, at, listened = None, -INTERVAL, False
        while True:
            now = self._clock()
            if (load := self._current_load()) is not None:
                prompts = self._source.take_prompts()
                if now >= at + INTERVAL or prompts or _differs(reported, load, now - at):
                    listened = await call("report_load", load, prompts)
                    reported, at = load, now
            await asyncio.sleep(_LOOK if listened else INTERVAL)

    def _current_load(self) -> Load | None:
        try:
            return self._source.load()
        except Exception:  # sharing goes on without it
            if not self._failed:
                logger.exception("load failed, so routers know nothing of this replica")
            self._failed = True
            return None


def _differs(reported: Load | None, load: Load, passed: float) -> bool:
    """Whether routers would expect another load `passed` seconds after the report."""
    if reported is None or reported.rates is None or load.prefill_s is None:
        return load != reported
    expected = max(0.0, (reported.prefill_s or 0.0) - passed)
    return abs(load.prefill_s - expected) > max(_LITTLE, _MUCH * expected)

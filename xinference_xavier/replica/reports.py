"""What a replica reports to its tracker: its holdings and its load.

Holdings go in batches of changes, or all at once: after a batch that the tracker refuses, and after
every new session, a snapshot follows. So nobody has to remember what was delivered. The load goes
with each heartbeat, and at once when it changes much while there is a router.

Threading: the event loop of the tracker's client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from xinference_xavier.protocol.load import Load, ScheduledPrompt
from xinference_xavier.protocol.tracker import NotMemberError, Outcome, pack

FLUSH_DELAY = 0.002  # seconds that the first queued key waits for further ones
MAX_QUEUED = 100_000  # keys; beyond them it is cheaper to publish all holdings

Call = Callable[..., Coroutine[Any, Any, Any]]
"""Calls a method of the tracker by name, for the replica in its namespace, with a deadline."""


@dataclass
class Counters:
    """Counts of a tracker client: publications as `batches` or `replacements` (snapshots), and
    failed sessions."""

    batches: int = 0
    replacements: int = 0
    failures: int = 0
    reconnects: int = 0
    stats_failures: int = 0
    claim_failures: int = 0


class Publisher:
    """`holdings` returns all keys that `incarnation` publishes. `last_sequence` is the number of
    the last publication."""

    def __init__(
        self,
        incarnation: str,
        holdings: Callable[[], Iterable[bytes]],
        counters: Counters,
    ) -> None:
        self.last_sequence = 0
        self._incarnation = incarnation
        self._holdings = holdings
        self._counters = counters
        self._queue: dict[bytes, bool] = {}
        self._replace_all = False
        self._work = asyncio.Event()

    def enqueue(self, keys: Iterable[bytes], *, held: bool) -> None:
        """Queue `keys` as held from now on, or as no longer held. The latter wait for the next held
        ones or for `flush`: a publication takes processor time from the engine and the tracker."""
        if not self._replace_all:
            self._queue.update(dict.fromkeys(keys, held))
            if len(self._queue) > MAX_QUEUED:
                self._queue, self._replace_all = {}, True
        if held:
            self._work.set()

    def flush(self) -> None:
        """Publish what is queued now."""
        if self._queue or self._replace_all:
            self._work.set()

    async def run(self, call: Call) -> None:
        """Publish what is queued, until the tracker no longer knows the replica."""
        while True:
            await self._work.wait()
            await asyncio.sleep(FLUSH_DELAY)
            self._work.clear()
            if self._replace_all or not await self._send_queued(call):
                await self.send_holdings(call)

    async def send_holdings(self, call: Call) -> None:
        # The holdings include everything queued so far.
        self._queue, self._replace_all = {}, False
        keys = pack(self._holdings())
        outcome = await self._send(call, "replace", keys)
        if outcome is not Outcome.APPLIED:
            raise RuntimeError(
                f"the tracker refused snapshot {self.last_sequence} of {self._incarnation!r} as "
                f"{outcome.value}; another replica must not use this incarnation"
            )
        self._counters.replacements += 1

    async def _send_queued(self, call: Call) -> bool:
        """Publish what is queued; False if the tracker needs a snapshot."""
        queue, self._queue = self._queue, {}
        if not queue:
            return True
        added = pack(key for key, held in queue.items() if held)
        removed = pack(key for key, held in queue.items() if not held)
        outcome = await self._send(call, "publish", added, removed)
        self._counters.batches += 1
        return outcome is Outcome.APPLIED

    async def _send(self, call: Call, method: str, *keys: bytes) -> Outcome:
        self.last_sequence += 1
        outcome: Outcome = await call(method, self.last_sequence, *keys)
        if outcome is Outcome.UNKNOWN:
            raise NotMemberError(f"the tracker does not know {self._incarnation!r}; join again")
        return outcome


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

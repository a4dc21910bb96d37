"""A replica's word to the tracker of what it holds: what changed, in batches, or all of it.

Threading: on the event loop of the tracker's client. A batch that the tracker does not take is made
good by a snapshot, and so is a session that ended: nothing has to be remembered about what was or
was not delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from xinference_xavier.protocol.tracker import NotMemberError, Outcome, pack

FLUSH_DELAY = 0.002
"""Seconds that the first queued key waits for others."""
MAX_QUEUED = 100_000
"""Keys; beyond them it is cheaper to publish all holdings."""

Call = Callable[..., Coroutine[Any, Any, Any]]
"""Calls the tracker's method of this name for the replica, in its namespace, with a deadline."""


@dataclass
class PublisherCounters:
    """Publications that the tracker took since the start."""

    batches: int = 0
    replacements: int = 0


class Publisher:
    """Of `incarnation`. `holdings` gives all keys that the replica would publish now.

    `last_sequence` is that of the last publication that was sent.
    """

    def __init__(
        self,
        incarnation: str,
        holdings: Callable[[], Iterable[bytes]],
        counters: PublisherCounters,
    ) -> None:
        self.last_sequence = 0
        self._incarnation = incarnation
        self._holdings = holdings
        self._counters = counters
        self._queue: dict[bytes, bool] = {}
        self._replace_all = False
        self._work = asyncio.Event()

    def enqueue(self, keys: Iterable[bytes], held: bool) -> None:
        """Tell of `keys` that they are held now, or held no more. That can wait for what is held
        next, or for `flush`: publications take processor time from the engine and the tracker."""
        if not self._replace_all:
            self._queue.update(dict.fromkeys(keys, held))
            if len(self._queue) > MAX_QUEUED:
                self._queue, self._replace_all = {}, True
        if held:
            self._work.set()

    def flush(self) -> None:
        """Let nothing that is queued wait any longer."""
        if self._queue or self._replace_all:
            self._work.set()

    async def run(self, call: Call) -> None:
        """Publish what is queued, for as long as the tracker knows the replica."""
        while True:
            await self._work.wait()
            await asyncio.sleep(FLUSH_DELAY)
            self._work.clear()
            if self._replace_all or not await self._send_queued(call):
                await self.send_holdings(call)

    async def send_holdings(self, call: Call) -> None:
        # What is queued up to here is part of the holdings; what comes later is queued anew.
        self._queue, self._replace_all = {}, False
        keys = pack(self._holdings())
        outcome = await self._send(call, "replace", keys)
        if outcome is not Outcome.APPLIED:
            raise RuntimeError(
                f"the tracker calls snapshot {self.last_sequence} of {self._incarnation!r} "
                f"{outcome.value}: is there another replica of this incarnation?"
            )
        self._counters.replacements += 1

    async def _send_queued(self, call: Call) -> bool:
        """Publish what is queued; False if only a snapshot can set things right."""
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
            raise NotMemberError(f"{self._incarnation!r} must join again")
        return outcome

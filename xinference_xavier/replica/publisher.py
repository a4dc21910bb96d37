"""Publishes a replica's holdings to the tracker: changes in batches, or everything at once.

Threading: on the event loop of the tracker's client. After a batch that the tracker refuses, and
after every new session, a snapshot follows. So nobody has to remember what was delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

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

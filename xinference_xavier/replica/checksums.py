"""Checksums of the rows that vLLM's workers have stored, computed off the scheduler thread.

Threading: belongs to one event loop. The computation runs on a thread of its own and releases the
GIL. A row is pinned meanwhile.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region

_BATCH = 16  # rows


class Checksums:
    """Calls `offer(keys)` with chunks that may be shared from now on."""

    def __init__(self, region: Region, pool: Pool, offer: Callable[[list[bytes]], None]) -> None:
        self._region = region
        self._pool = pool
        self._offer = offer
        # By slot: a new row replaces an evicted one, so there are never more than slots.
        self._waiting: dict[int, Row] = {}
        self._work = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "xavier-checksum")

    def add(self, rows: Sequence[Row]) -> None:
        self._waiting.update((row.slot, row) for row in rows)
        self._work.set()

    async def run(self) -> None:
        """Compute checksums until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            batch = [self._waiting.pop(slot) for slot in list(islice(self._waiting, _BATCH))]
            if not self._waiting:
                self._work.clear()
            pinned = [row for row in batch if self._pool.pin_row(row)]
            try:
                checksums = await loop.run_in_executor(self._thread, self._checksum, pinned)
                # Without an await between the two, so that a withdrawal can only follow the offer.
                pairs = zip(pinned, checksums, strict=True)
                self._offer([row.key for row, c in pairs if self._pool.set_checksum(row, c)])
            finally:
                self._pool.unpin(pinned)

    def _checksum(self, rows: Sequence[Row]) -> list[int]:
        return [self._region.checksum(row.slot, row.key) for row in rows]

"""Sums up the rows that workers have stored, off the scheduler thread.

Threading: belongs to one event loop; the summing itself runs on a thread of its own and lets go of
Python's lock. A row is pinned while it is summed up.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region

_BATCH = 16  # rows between two offers


class Checksums:
    """`offer(keys)` is called with chunks that may be shared from now on."""

    def __init__(self, region: Region, pool: Pool, offer: Callable[[list[bytes]], None]) -> None:
        self._region = region
        self._pool = pool
        self._offer = offer
        # By slot: who waits for a stay that is over gives way to the next one, so that there are
        # never more than slots.
        self._waiting: dict[int, Row] = {}
        self._work = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "xavier-checksum")

    def __len__(self) -> int:
        """Rows that wait."""
        return len(self._waiting)

    def add(self, rows: Sequence[Row]) -> None:
        self._waiting.update((row.slot, row) for row in rows)
        self._work.set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            batch = [self._waiting.pop(slot) for slot in list(islice(self._waiting, _BATCH))]
            if not self._waiting:
                self._work.clear()
            pinned = [row for row in batch if self._pool.pin_row(row)]
            try:
                sums = await loop.run_in_executor(self._thread, self._sum, pinned)
                # Both in one go of the loop: an eviction's withdrawal can only come after.
                summed = zip(pinned, sums, strict=True)
                self._offer([row.key for row, s in summed if self._pool.set_checksum(row, s)])
            finally:
                self._pool.unpin(pinned)

    def _sum(self, rows: Sequence[Row]) -> list[int]:
        return [self._region.checksum(row.slot, row.key) for row in rows]

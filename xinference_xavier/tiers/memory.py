"""The smallest tier: evicted chunks stay in a dictionary of this process.

An example of the contract in `base`, and a tier for tests. It copies rows when they are stored,
because an evicted row's bytes are gone, and loads in the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.tiers.base import Fetch, FetchState, Tier

SOURCE = "memory"


class MemoryTier(Tier):
    """Keeps the bytes of the `max_chunks` latest stored chunks."""

    def __init__(self, pool: Pool, region: Region, max_chunks: int) -> None:
        self._pool = pool
        self._rows = region.array
        self._max_chunks = max_chunks
        self._chunks: dict[bytes, npt.NDArray[np.uint8]] = {}
        self.holders = lambda key: int(key in self._chunks)
        self._closed = False

    @property
    def ready(self) -> bool:
        return not self._closed

    def sources(self, holders: int) -> list[str]:
        return [SOURCE] if holders else []

    def set_of(self, sources: Iterable[str]) -> int:
        return int(SOURCE in sources)

    def submit_load(
        self,
        source: str,
        rows: list[Row],
        deadline: float,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Fetch | None:
        if self._closed:
            for row in rows:
                self._pool.abort(row)
            return None
        fetch = Fetch(source, rows, deadline, trace_headers)
        for row in rows:
            chunk = self._chunks.get(row.key)
            if chunk is None:
                fetch.reason = "not held"
                break
            self._rows[row.slot] = chunk
            if not self._pool.commit(row, pins=1):
                fetch.reason = "reset"
                break
            fetch.committed.append(row)
        for row in rows:  # does nothing to committed rows
            self._pool.abort(row)
        fetch.seconds = time.monotonic() - fetch.began
        fetch.state = FetchState.ROLLED_BACK if fetch.reason else FetchState.COMMITTED
        fetch.ended.set()
        return fetch

    def on_stored(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._chunks.pop(row.key, None)
            self._chunks[row.key] = self._rows[row.slot].copy()
        while len(self._chunks) > self._max_chunks:
            del self._chunks[next(iter(self._chunks))]

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        """Their bytes were copied when they were stored."""

    def reset(self) -> None:
        self._chunks.clear()
        self._pool.reset()

    def close(self) -> None:
        self._closed = True

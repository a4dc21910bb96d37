"""Chunks that replicas will hold soon, because requests for them have been sent there.

The index learns of a chunk when it has been computed. Until then, and for `GRACE` seconds longer
than that was predicted to take, the router expects it. Pure; belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

GRACE = 2.0
"""Seconds in which a chunk that has been computed reaches the index."""


class Expected:
    def __init__(self) -> None:
        self.sets: dict[bytes, int] = {}
        """By key, the numbers of the replicas as bits, as in the index."""
        self._until: dict[tuple[bytes, int], float] = {}
        self._ends: list[tuple[float, int, Sequence[bytes]]] = []  # a heap

    def add(self, bit: int, keys: Sequence[bytes], until: float) -> None:
        """Expect `keys` at the replica with this bit up to `until`."""
        for key in keys:
            self.sets[key] = self.sets.get(key, 0) | bit
            self._until[key, bit] = max(until, self._until.get((key, bit), until))
        if keys:
            heappush(self._ends, (until, bit, keys))

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, bit, keys = heappop(self._ends)
            self._remove(bit, (key for key in keys if self._until.get((key, bit), now) <= now))

    def _remove(self, bit: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._until.pop((key, bit), None) is None:
                continue
            self.sets[key] &= ~bit
            if not self.sets[key]:
                del self.sets[key]

    def clear(self) -> None:
        self.sets.clear()
        self._until.clear()
        self._ends.clear()

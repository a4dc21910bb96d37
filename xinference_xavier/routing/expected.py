"""Chunks that replicas will hold, or hold where the index does not look."""

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush


class Expected:
    """Chunks that replicas hold until some time. At most `bound` are remembered, each as often as
    it was added; those that end first are forgotten first."""

    def __init__(self, bound: float = math.inf) -> None:
        self.sets: dict[bytes, int] = {}
        """Replicas as bits, by key, as in the index."""
        self._until: dict[tuple[bytes, int], float] = {}
        self._ends: list[tuple[float, int, Sequence[bytes]]] = []  # a heap
        self._bound = bound
        self._size = 0  # of all keys in the heap

    def add(self, bit: int, keys: Sequence[bytes], until: float) -> None:
        """Expect `keys` at the replica with this bit up to `until`."""
        for key in keys:
            self.sets[key] = self.sets.get(key, 0) | bit
            self._until[key, bit] = max(until, self._until.get((key, bit), until))
        if keys:
            heappush(self._ends, (until, bit, keys))
            self._size += len(keys)
        while self._size > self._bound:
            self.expire(self._ends[0][0])

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, bit, keys = heappop(self._ends)
            self._size -= len(keys)
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
        self._size = 0

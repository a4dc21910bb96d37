"""In which order rows are evicted. Belongs to `Pool`, under its lock; O(1) per row.

Least recently used first, with one exception: of the older half of the slots' worth of rows, those
that can be spared go before all others. A small part of the rows would not do: soon it would
consist of rows that cannot be spared, and hold as many of them only as it is large. All of them
would: what a replica copies today from a peer that it asks often would be copied again tomorrow.

Rows pass from `_fresh` to `_passed` in order of age, at most `LOOKS` for an eviction, and each is
judged once in doing so. Who uses a row makes it fresh again.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

LOOKS = 8
"""Rows judged for one eviction at most, so that one that finds many of them waits for none."""


class Keyed(Protocol):
    key: bytes


R = TypeVar("R", bound=Keyed)


class EvictionOrder(Generic[R]):
    """The rows that may be evicted, out of `slots`."""

    def __init__(self, slots: int) -> None:
        self._most_passed = slots // 2
        self._fresh: OrderedDict[bytes, R] = OrderedDict()  # oldest first
        self._passed: OrderedDict[bytes, R] = OrderedDict()  # older than all of these

    def __contains__(self, key: bytes) -> bool:
        return key in self._fresh or key in self._passed

    def add(self, row: R) -> None:
        """As the most recently used one."""
        self._fresh[row.key] = row

    def remove(self, key: bytes) -> None:
        """Raises KeyError for what is not here."""
        if self._fresh.pop(key, None) is None:
            del self._passed[key]

    def touch(self, key: bytes) -> None:
        """Make the row the most recently used one, if it is here."""
        if key in self._fresh:
            self._fresh.move_to_end(key)
        elif key in self._passed:
            self._fresh[key] = self._passed.pop(key)

    def clear(self) -> None:
        self._fresh.clear()
        self._passed.clear()

    def take(self, spare: Callable[[R], bool], keep: Collection[bytes]) -> R | None:
        """Remove and return the next one to evict; None if that were one of `keep`."""
        for _ in range(LOOKS):
            row = next(iter(self._fresh.values()), None)
            if row is None or row.key in keep:
                break
            del self._fresh[row.key]
            if spare(row):
                return row
            self._passed[row.key] = row
            if len(self._passed) > self._most_passed:
                break
        row = next(iter((self._passed or self._fresh).values()), None)
        if row is None or row.key in keep:
            return None
        self.remove(row.key)
        return row

"""Which row the pool evicts next.

`Pool` owns the policy and calls it under its lock, for idle rows only: READY and unpinned. Every
call is O(1) per row, with no I/O.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

MAX_SCAN = 8
"""Rows that one eviction examines at most."""


class Keyed(Protocol):
    key: bytes


R = TypeVar("R", bound=Keyed)


class EvictionPolicy(ABC, Generic[R]):
    """Holds the rows that may be evicted, in three classes.

    Redundant rows, which a peer can give back, go first. Protected rows go last. Everything else
    is in between.
    """

    @abstractmethod
    def add(self, row: R) -> None:
        """Add the row as the most recently used one."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Raises KeyError if the row is not here."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Make the row the most recently used one, if it is here."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows, but not which keys are protected."""

    @abstractmethod
    def protect(self, key: bytes) -> None:
        """Evict this key's row, now or later, only when no unprotected row is left.

        The caller bounds how many keys are protected.
        """

    @abstractmethod
    def unprotect(self, key: bytes) -> None:
        """Undo `protect`; the row becomes the most recently used one."""

    @abstractmethod
    def take(self, redundant: Callable[[R], bool], keep: Collection[bytes]) -> R | None:
        """Remove and return the next victim; None if nothing but `keep` is left."""


class SegmentedLRU(EvictionPolicy[R]):
    """Least recently used first, except that redundant rows go first among the older half.

    The older half is the probation segment. If it were smaller, it would soon hold only rows that
    are not redundant. If it held all rows, copies in use would be evicted and fetched again.

    Rows move from the recent segment to probation in order of age, at most `MAX_SCAN` per
    eviction, and are checked for redundancy once on the way. Using a row moves it back.
    """

    def __init__(self, slots: int) -> None:
        self._max_probation = slots // 2
        self._recent: OrderedDict[bytes, R] = OrderedDict()  # oldest first
        self._probation: OrderedDict[bytes, R] = OrderedDict()  # older than all of `_recent`
        self._protected: OrderedDict[bytes, R] = OrderedDict()
        self._protected_keys: set[bytes] = set()

    def add(self, row: R) -> None:
        segment = self._protected if row.key in self._protected_keys else self._recent
        segment[row.key] = row

    def remove(self, key: bytes) -> None:
        for segment in (self._recent, self._probation):
            if segment.pop(key, None) is not None:
                return
        del self._protected[key]

    def touch(self, key: bytes) -> None:
        if key in self._recent:
            self._recent.move_to_end(key)
        elif key in self._probation:
            self._recent[key] = self._probation.pop(key)
        elif key in self._protected:
            self._protected.move_to_end(key)

    def clear(self) -> None:
        self._recent.clear()
        self._probation.clear()
        self._protected.clear()

    def protect(self, key: bytes) -> None:
        self._protected_keys.add(key)
        row = self._recent.pop(key, None) or self._probation.pop(key, None)
        if row is not None:
            self._protected[key] = row

    def unprotect(self, key: bytes) -> None:
        self._protected_keys.discard(key)
        row = self._protected.pop(key, None)
        if row is not None:
            self._recent[key] = row

    def take(self, redundant: Callable[[R], bool], keep: Collection[bytes]) -> R | None:
        for _ in range(MAX_SCAN):
            row = next(iter(self._recent.values()), None)
            if row is None or row.key in keep:
                break
            del self._recent[row.key]
            if redundant(row):
                return row
            self._probation[row.key] = row
            if len(self._probation) > self._max_probation:
                break
        for segment in (self._probation or self._recent, self._protected):
            row = next(iter(segment.values()), None)
            if row is not None and row.key not in keep:
                del segment[row.key]
                return row
        return None

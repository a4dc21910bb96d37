"""Which row the pool evicts next.

`Pool` owns the policy and calls it under its lock, for idle rows only: READY and unpinned. Every
call is O(1) per row, with no I/O. The scheduler thread may take a thousand rows at once, so each of
them costs little more than its moves from dictionary to dictionary.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

MAX_SCAN = 4
"""Rows examined per victim, at most."""


class Keyed(Protocol):
    key: bytes


R = TypeVar("R", bound=Keyed)


class Protection(Enum):
    NONE = auto()
    SOFT = auto()  # evicted when no unprotected row is left
    FIRM = auto()  # never evicted


class SegmentedLRU(Generic[R]):
    """Holds the rows that may be evicted, and gives up the least recently used one first.

    Redundant rows, which a peer can give back, go first among the older half. Protected rows go
    last, firmly protected ones never.

    The older half is the probation segment. If it were smaller, it would soon hold only rows that
    are not redundant. If it held all rows, copies in use would be evicted and fetched again.

    Rows move from the recent segment to probation in order of age, at most `MAX_SCAN` per victim,
    and are checked for redundancy once on the way. Using a row moves it back.
    """

    def __init__(self, slots: int) -> None:
        self._max_probation = slots // 2
        self._recent: OrderedDict[bytes, R] = OrderedDict()  # oldest first
        self._probation: OrderedDict[bytes, R] = OrderedDict()  # older than all of `_recent`
        self._protected: OrderedDict[bytes, R] = OrderedDict()
        self._firm: OrderedDict[bytes, R] = OrderedDict()
        self._segment_of: dict[bytes, OrderedDict[bytes, R]] = {}  # of protected keys

    def add(self, row: R) -> None:
        """Add the row as the most recently used one."""
        self._segment_of.get(row.key, self._recent)[row.key] = row

    def remove(self, key: bytes) -> None:
        """Raises KeyError if the row is not here."""
        for segment in (self._recent, self._probation, self._protected):
            if segment.pop(key, None) is not None:
                return
        del self._firm[key]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make those rows that are here the most recently used, the last one most recently."""
        recent, probation, protected = self._recent, self._probation, self._protected
        for key in keys:
            if key in recent:
                recent.move_to_end(key)
            elif key in probation:
                recent[key] = probation.pop(key)
            elif key in protected:
                protected.move_to_end(key)

    def clear(self) -> None:
        """Forget all rows, but not which keys are protected."""
        self._recent.clear()
        self._probation.clear()
        self._protected.clear()
        self._firm.clear()

    def protect(self, key: bytes, how: Protection) -> None:
        """Protect this key's row, now or later. The last call for a key counts. The caller bounds
        how many keys are protected."""
        if how is not Protection.NONE:
            self._segment_of[key] = self._protected if how is Protection.SOFT else self._firm
        elif self._segment_of.pop(key, None) is None:
            return
        for segment in (self._recent, self._probation, self._protected, self._firm):
            if (row := segment.pop(key, None)) is not None:
                self.add(row)
                return

    def take(
        self,
        count: int,
        redundant: Callable[[R], bool],
        keep: Collection[bytes] = (),
        protected: bool = True,
    ) -> list[R]:
        """Remove and return `count` victims; fewer if nothing but `keep` is left, or nothing but
        `protected` rows while these shall not be taken."""
        recent, probation = self._recent, self._probation
        victims: list[R] = []
        # A row that is examined joins probation, or probation gives one victim less.
        room = self._max_probation + count - len(probation)
        for _ in range(min(len(recent), room, MAX_SCAN * count)):
            key, row = recent.popitem(last=False)
            if key in keep:
                _put_back(recent, row)
                break
            if not redundant(row):
                probation[key] = row
                continue
            victims.append(row)
            if len(victims) == count:
                break
        # If probation is empty now, so are the recent rows, except for those to keep.
        for segment in (probation, self._protected) if protected else (probation,):
            for _ in range(min(len(segment), count - len(victims))):
                key, row = segment.popitem(last=False)
                if key in keep:
                    _put_back(segment, row)
                    break
                victims.append(row)
        return victims


def _put_back(segment: OrderedDict[bytes, R], oldest: R) -> None:
    segment[oldest.key] = oldest
    segment.move_to_end(oldest.key, last=False)

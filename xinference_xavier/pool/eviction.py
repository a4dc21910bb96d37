"""Which row the pool evicts next.

`Pool` owns the policy and calls it under its lock, for idle rows only: READY and unpinned. Every
call is O(1) per row, with no I/O. The scheduler thread may take a thousand rows at once, so each of
them costs little more than its moves from dictionary to dictionary.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum, auto
from itertools import chain
from typing import Generic, Protocol, TypeVar

MAX_SCAN = 4
"""Rows examined per victim, at most."""
_LEAST_SHARE = 0.25
"""Without reasoning, half of what is generated is asked for even if chats have two turns. With it,
nothing is."""
_AVERAGED = 100
"""Chunks, of a few dozen answers."""


class Keyed(Protocol):
    key: bytes


R = TypeVar("R", bound=Keyed)


class Protection(Enum):
    NONE = auto()
    SOFT = auto()  # evicted when no unprotected row is left
    FIRM = auto()  # never evicted


class SegmentedLRU(Generic[R]):
    """Holds the rows that may be evicted, and gives up the least recently used one first.

    Rows on probation go before all others, protected rows last, and firmly protected ones never.

    The others are in two halves. In the older one, redundant rows, which a peer can give back, go
    first. If that half were smaller, it would soon hold only rows that are not redundant. If it
    held all rows, copies in use would be evicted and fetched again.

    Rows move from the recent half to the older one in order of age, at most `MAX_SCAN` per victim,
    and are checked for redundancy once on the way. Using a row moves it back.
    """

    def __init__(self, slots: int) -> None:
        self._max_older = slots // 2
        self._recent: OrderedDict[bytes, R] = OrderedDict()  # oldest first
        self._older: OrderedDict[bytes, R] = OrderedDict()  # older than all of `_recent`
        self._probation: OrderedDict[bytes, R] = OrderedDict()
        self._protected: OrderedDict[bytes, R] = OrderedDict()
        self._firm: OrderedDict[bytes, R] = OrderedDict()
        self._segment_of: dict[bytes, OrderedDict[bytes, R]] = {}  # of protected keys

    def __iter__(self) -> Iterator[R]:
        segments = (self._recent, self._older, self._probation, self._protected, self._firm)
        return chain.from_iterable(segment.values() for segment in segments)

    def add(self, row: R, probation: bool = False) -> None:
        """Add the row as the most recently used one. To end its probation, remove and add it."""
        segment = self._probation if probation else self._recent
        self._segment_of.get(row.key, segment)[row.key] = row

    def remove(self, key: bytes) -> None:
        """Raises KeyError if the row is not here."""
        for segment in (self._recent, self._older, self._probation, self._protected):
            if segment.pop(key, None) is not None:
                return
        del self._firm[key]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make those rows that are here the most recently used, the last one most recently. Those
        on probation stay there."""
        recent, older = self._recent, self._older
        probation, protected = self._probation, self._protected
        for key in keys:
            if key in recent:
                recent.move_to_end(key)
            elif key in older:
                recent[key] = older.pop(key)
            elif key in probation:
                probation.move_to_end(key)
            elif key in protected:
                protected.move_to_end(key)

    def clear(self) -> None:
        """Forget all rows, but not which keys are protected."""
        self._recent.clear()
        self._older.clear()
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
        for segment in (self._recent, self._older, self._probation, self._protected, self._firm):
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
        recent, older = self._recent, self._older
        victims = _oldest(self._probation, count, keep)
        count -= len(victims)
        # A row that is examined joins the older half, or that gives one victim less.
        room = self._max_older + count - len(older)
        for _ in range(min(len(recent), room, MAX_SCAN * count)):
            key, row = recent.popitem(last=False)
            if key in keep:
                _put_back(recent, row)
                break
            if not redundant(row):
                older[key] = row
                continue
            victims.append(row)
            count -= 1
            if not count:
                break
        # If the older half is empty now, so is the recent one, except for rows to keep.
        for segment in (older, self._protected) if protected else (older,):
            found = _oldest(segment, count, keep)
            victims += found
            count -= len(found)
        return victims


def _oldest(segment: OrderedDict[bytes, R], count: int, keep: Collection[bytes]) -> list[R]:
    """Remove and return up to `count` rows, up to the first one to `keep`."""
    found: list[R] = []
    for _ in range(min(len(segment), count)):
        key, row = segment.popitem(last=False)
        if key in keep:
            _put_back(segment, row)
            break
        found.append(row)
    return found


def _put_back(segment: OrderedDict[bytes, R], oldest: R) -> None:
    segment[oldest.key] = oldest
    segment.move_to_end(oldest.key, last=False)


class Generations:
    """Notices whether prompts have what was generated for the prompts before them.

    They have it where a chat's history has each answer as it was. Most chat templates leave out
    reasoning, and then the keys of all that follows are others.
    """

    def __init__(self, most: int) -> None:
        """Counts what is asked for among the next `most` chunks. Evicted ones count: if all went
        first, it would never notice that they are asked for."""
        self._most = most
        self._unasked: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._share = 0.0

    def add(self, key: bytes) -> None:
        """The chunk was generated."""
        self._unasked[key] = None
        if len(self._unasked) > self._most:
            self._unasked.popitem(last=False)
            self._share -= self._share / _AVERAGED

    def asked(self, keys: Iterable[bytes]) -> None:
        """Another request, or a peer, needs these chunks."""
        for key in self._unasked.keys() & keys:
            del self._unasked[key]
            self._share += (1 - self._share) / _AVERAGED

    @property
    def are_asked_for(self) -> bool:
        return self._share > _LEAST_SHARE

"""Which slot of a replica's region holds which chunk, and who may touch it.

Every slot is in one of five states; `Pool` alone moves it between them:

    FREE → FILLING         reserve: a worker's store or a fetch will write the row
    FILLING → READY        commit: the bytes are complete; lookups hit
    FILLING → FREE         abort: the row is void, and nobody can write it any more
    FILLING → QUARANTINED  quarantine, reset, or flush of a row that is fetched: the row is void,
                           but may still be written
    READY → FREE           eviction of an unpinned row, see `eviction.py`
    READY → FLUSHED        flush: lookups miss, but whoever looked it up before can still pin it
    FLUSHED → FREE         reserve takes the slots of unpinned ones first
    … → QUARANTINED        reset while the row is pinned
    QUARANTINED → FREE     abort by its writer, or the last unpin by its readers

A row that a neighbour lends is here, too, as long as it is FILLING or pinned. It takes no slot: its
number is beyond the own ones, and whoever borrowed it gives it back once nobody has it pinned.

Pure bookkeeping: no I/O, no clock. Every operation is O(1) per row.

Threading: the scheduler thread reserves and evicts; the background thread pins, commits and aborts,
reserves free slots, and goes through all rows, a portion at a time. A lock protects
each operation. `lookup` and `holds` take no lock.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from xinference_xavier.pool.eviction import Generations, Protection, SegmentedLRU


class RowState(Enum):
    FREE = auto()
    FILLING = auto()
    READY = auto()
    FLUSHED = auto()
    QUARANTINED = auto()


# To read a member of an enum takes 100 ns, ten times as long as to read a global.
_FREE, _FILLING, _READY, _FLUSHED, _QUARANTINED = RowState

_SPARE = 64
"""`evict_ahead` keeps one row in so many free."""


@dataclass(eq=False, slots=True, repr=False)
class Row:
    """One chunk in one slot. Each new chunk is a new object, so a stale handle does no harm."""

    key: bytes
    slot: int
    state: RowState = RowState.FILLING
    pins: int = 0
    checksum: int | None = None  # not shared until it is computed
    replicated_from: str | None = None  # the donor, until this row is copied itself
    origin: str | None = None  # the donor; None: computed here
    probation: bool = False  # generated, and no other request has needed it yet
    is_lent: bool = False  # by a neighbour, which has it in its own pool

    def __repr__(self) -> str:
        return f"Row(slot={self.slot}, {self.state.name}, pins={self.pins})"


class Reservation(NamedTuple):
    rows: list[Row]  # one per key that got a slot, in order
    evicted: list[bytes]  # keys


class PoolCounts(NamedTuple):
    rows: int
    ready: int
    filling: int
    pinned: int
    quarantined: int


Redundant = Callable[[Row], bool]
"""Tells whether to evict a row before others. Runs under the pool's lock and must not wait."""
_Victims = Redundant | None


def _never(_: Row) -> bool:
    return False


class Pool:
    """`slots` rows; keys are vLLM's offload keys."""

    def __init__(self, slots: int) -> None:
        self.slots, self._lock = slots, threading.Lock()
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[bytes, Row] = {}  # FILLING, READY and FLUSHED
        self._idle = SegmentedLRU[Row](slots)  # READY and unpinned
        self._generations = Generations(slots)
        self.held: Set[bytes] = self._held.keys()  # most lookups are of others, and end here
        self._flushed: dict[bytes, Row] = {}  # FLUSHED and unpinned
        self._filling = self._ready = self._pinned = self._quarantined = 0

    def lookup(self, key: bytes) -> Row | None:
        """The READY row of `key`. Stays valid while only the calling thread evicts."""
        row = self._held.get(key)
        return row if row is not None and row.state is _READY else None

    def holds(self, key: bytes) -> bool:
        """True if `reserve` would take no slot for `key`: it is READY, FILLING or pinned."""
        return key in self._held and key not in self._flushed

    def rows(self) -> list[Row]:
        """All rows that are held now. Their states may change meanwhile."""
        with self._lock:
            return list(self._held.values())

    def counts(self) -> PoolCounts:
        with self._lock:
            in_use = self._filling, self._pinned, self._quarantined
            return PoolCounts(self.slots, self._ready, *in_use)

    # -- writing a row ---------------------------------------------------------------------

    def reserve(
        self, keys: Iterable[bytes], prefix: Sequence[bytes] = (), redundant: _Victims = _never
    ) -> Reservation:
        """Take slots for the keys that are not held, evicting other rows where necessary. With
        `redundant` None nothing is evicted, and any thread may call it.

        The whole `prefix` that they belong to stays, and becomes the most recently used one. Stops
        at the first key without a slot: a chunk is useless without those before it.
        """
        with self._lock:
            held, reusable = self._held, self._flushed if redundant else {}
            wanted = [*dict.fromkeys(keys)]
            if not self.held.isdisjoint(wanted):
                wanted = [key for key in wanted if key not in held or key in reusable]
            if reusable:
                self._free_flushed(wanted, len(wanted))
            if len(wanted) < len(prefix):  # else none of them is held
                self._idle.touch(reversed(prefix))
            victims = []
            if redundant and (lacking := len(wanted) - len(self._free)) > 0:
                victims = self._idle.take(lacking, redundant, frozenset(prefix))
                self._ready -= len(victims)
            evicted = [row.key for row in victims]
            rows = [Row(key, self._free.pop()) for key in wanted[: len(self._free)]]
            held.update(zip(wanted, rows, strict=False))
            # An old row goes before a new one comes, or each call would collect garbage.
            for key in wanted[len(rows) : len(rows) + len(victims)]:
                self._forget(victims.pop())
                rows.append(held.setdefault(key, Row(key, self._free.pop())))
            self._filling += len(rows)
        return Reservation(rows, evicted)

    def evict_ahead(self, most: int, redundant: Redundant = _never) -> list[bytes]:
        """Evict up to `most` rows, so that a few are free when `reserve` needs many at once.
        Returns their keys."""
        target = min(self.slots // _SPARE, len(self._free) + most)
        if len(self._free) >= target:
            return []
        with self._lock:
            self._free_flushed((), target)
            victims = self._idle.take(target - len(self._free), redundant, protected=False)
            self._ready -= len(victims)
            for row in victims:
                self._forget(row)
        return [row.key for row in victims]

    def _free_flushed(self, wanted: Iterable[bytes], slots: int) -> None:
        """Free the rows of `wanted`, and others until so many slots are free."""
        for key in self._flushed.keys() & wanted:
            self._forget(self._flushed.pop(key))
        while self._flushed and len(self._free) < slots:
            self._forget(self._flushed.popitem()[1])

    def _forget(self, row: Row) -> None:
        del self._held[row.key]
        self._free_slot(row)

    def borrow(self, keys: Iterable[bytes]) -> list[Row]:
        """Rows that a neighbour is to lend, for the keys that are not held. They have their slots
        when they are committed. For the evicting thread, as `reserve`."""
        with self._lock:
            wanted = [*dict.fromkeys(keys)]
            self._free_flushed(wanted, 0)
            wanted = [key for key in wanted if key not in self._held]
            rows = [Row(key, self.slots, is_lent=True) for key in wanted]
            self._held.update(zip(wanted, rows, strict=True))
        return rows

    def commit(self, row: Row, checksum: int | None = None, pins: int = 0) -> bool:
        """The row's bytes are complete. False if a reset came first."""
        with self._lock:
            if row.state is not _FILLING:
                return False
            row.state = _READY
            row.checksum = checksum
            self._filling -= not row.is_lent
            self._ready += not row.is_lent
            if row.probation:
                self._generations.add(row.key)
                row.probation = not self._generations.are_asked_for
            if pins:
                row.pins = pins
                self._pinned += not row.is_lent
            else:
                self._idle.add(row, row.probation)
            return True

    def quarantine(self, *rows: Row) -> None:
        """Void the rows that are FILLING; their slots may still be written."""
        with self._lock:
            self._quarantine(rows)

    def _quarantine(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.state is _FILLING:
                del self._held[row.key]
                row.state = _QUARANTINED
                self._filling -= not row.is_lent
                self._quarantined += not row.is_lent

    def abort(self, *rows: Row) -> None:
        """Void the rows; nobody can write their slots any more. Does nothing to READY ones."""
        with self._lock:
            for row in rows:
                if row.state is _FILLING:
                    self._filling -= not row.is_lent
                    self._forget(row)
                elif row.state is _QUARANTINED and row.pins == 0:
                    self._leave_quarantine(row)

    def _leave_quarantine(self, row: Row) -> None:
        self._quarantined -= not row.is_lent
        self._free_slot(row)

    def _free_slot(self, row: Row) -> None:
        row.state = _FREE
        if not row.is_lent:
            self._free.append(row.slot)

    def set_checksum(self, row: Row, checksum: int) -> bool:
        """Share the row from now on. False if it is no longer READY."""
        with self._lock:
            if is_ready := row.state is _READY:
                row.checksum = checksum
            return is_ready

    # -- reading a row ---------------------------------------------------------------------

    def pin(self, keys: Iterable[bytes]) -> list[Row]:
        """Pin the leading run of `keys` that are READY, or were for the evicting thread's lookups
        in this step. A pinned row is not evicted."""
        with self._lock:
            return self._pin_run(keys, shared=False)

    def pin_shared(self, keys: Iterable[bytes]) -> list[Row]:
        """Pin the leading run of `keys` that peers may fetch, for a peer that will copy them.

        Their probation ends, and they no longer count as copies. Otherwise two replicas could each
        hold a copy of the other's row, and both could evict theirs as redundant.
        """
        with self._lock:
            run = self._pin_run(keys, shared=True)
            self._generations.asked([row.key for row in run])
            for row in run:
                row.replicated_from = None
                row.probation = False
            return run

    def pin_row(self, row: Row) -> bool:
        """Pin this row. False if it is not READY."""
        with self._lock:
            if is_ready := row.state is _READY:
                self._pin(row)
            return is_ready

    def _pin(self, row: Row) -> None:
        if row.pins == 0:
            self._pinned += 1
            if row.state is _READY:
                self._idle.remove(row.key)
            else:
                del self._flushed[row.key]
        row.pins += 1

    def _pin_run(self, keys: Iterable[bytes], shared: bool) -> list[Row]:
        run: list[Row] = []
        for key in keys:
            row = self._held.get(key)
            if row is None or row.state is _FILLING:
                break
            if shared and (row.state is not _READY or row.checksum is None):
                break
            self._pin(row)
            run.append(row)
        return run

    def unpin(self, rows: Sequence[Row]) -> None:
        """Undo one `pin` of each row.

        Unpinned rows become the most recently used ones, the first of them most recently, so that a
        prefix is evicted from its end.
        """
        with self._lock:
            for row in reversed(rows):
                row.pins -= 1
                if row.pins:
                    continue
                self._pinned -= not row.is_lent
                if row.state is _QUARANTINED:  # there was a reset
                    self._leave_quarantine(row)
                elif row.is_lent:
                    self._forget(row)
                elif row.state is _READY:
                    self._idle.add(row, row.probation)
                else:
                    self._flushed[row.key] = row

    def end_probation(self, keys: Sequence[bytes]) -> None:
        """Some request needs these chunks, and has stored none of them."""
        with self._lock:
            self._generations.asked(keys)
            for key in keys:
                row = self._held.get(key)
                if row is not None and row.probation and row.state is _READY:
                    row.probation = False
                    if not row.pins:
                        self._idle.remove(key)
                        self._idle.add(row)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make the rows the most recently used, in the given order (the last is the newest). It
        ends no probation."""
        with self._lock:
            self._idle.touch(keys)

    def protect(self, keys: Iterable[bytes], how: Protection) -> None:
        """Decide when the rows of `keys` are evicted, now or later."""
        with self._lock:
            for key in keys:
                self._idle.protect(key, how)

    # -- dropping rows ---------------------------------------------------------------------

    def flush(self, rows: Iterable[Row]) -> list[Row]:
        """Make lookups miss these rows, and void those that are being fetched; returns those that
        were READY.

        Any thread may call it: a row that the evicting thread has just looked up can be pinned
        until that thread reserves rows.
        """
        with self._lock:
            rows = [*rows]
            self._quarantine(row for row in rows if row.origin is not None)
            ready = [row for row in rows if row.state is _READY]
            for row in ready:
                row.state = _FLUSHED
                if not row.pins:
                    self._idle.remove(row.key)
                    self._flushed[row.key] = row
            self._ready -= sum(not row.is_lent for row in ready)
        return ready

    def reset(self) -> None:
        """Forget every chunk. The slot of a FILLING or pinned row stays in quarantine until its
        writer calls `abort` or its readers call `unpin`."""
        with self._lock:
            for row in self._held.values():
                if row.state is _FILLING or row.pins:
                    row.state = _QUARANTINED
                    self._quarantined += not row.is_lent
                else:
                    self._free_slot(row)
            self._held.clear()
            self._idle.clear()
            self._flushed.clear()
            self._filling = self._ready = 0

    # -- for tests -------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError unless each slot is in one state, and each row where it belongs."""
        with self._lock:
            lent = [row for row in self._held.values() if row.is_lent]
            assert all(row.pins or row.state is _FILLING for row in lent), "a loan is forgotten"
            rows = [row for row in self._held.values() if not row.is_lent]
            slots = [*self._free, *(row.slot for row in rows)]
            assert len({*slots}) == len(slots) == self.slots - self._quarantined, "a slot is lost"
            states = Counter(row.state for row in rows)
            assert (states[_FILLING], states[_READY]) == (self._filling, self._ready)
            assert states.keys() <= {_FILLING, _READY, _FLUSHED}
            in_quarantine = self._pinned - sum(row.pins > 0 for row in rows)
            assert 0 <= in_quarantine <= self._quarantined, "a pin is lost"
            idle = Counter(row.slot for row in rows if row.state is _READY and not row.pins)
            assert Counter(row.slot for row in self._idle) == idle, "what may be evicted is wrong"
            flushed = {row.slot for row in rows if row.state is _FLUSHED and not row.pins}
            assert {row.slot for row in self._flushed.values()} == flushed


# -- many rows, a portion at a time ---------------------------------------------------------------
#
# Between two portions other threads run, or the scheduler thread would wait for the pool's lock, or
# 5 ms for Python's. It must not call these functions itself.

PORTION = 1024  # rows
_PAUSE = 1e-6  # seconds
_T = TypeVar("_T")


def shared_keys(pool: Pool) -> list[bytes]:
    """Keys of all rows that peers may fetch: READY, with a checksum."""
    return [
        row.key
        for rows in _in_portions(pool.rows())
        for row in rows
        if row.state is RowState.READY and row.checksum is not None
    ]


def flush(pool: Pool, of: Callable[[Row], bool] = lambda _: True) -> list[bytes]:
    """`Pool.flush` for all rows, or those for which `of` is true; returns the keys of the READY
    ones."""
    return [
        row.key
        for rows in _in_portions(pool.rows())
        for row in pool.flush(row for row in rows if of(row))
    ]


def protect(pool: Pool, keys: Sequence[bytes], how: Protection) -> None:
    for portion in _in_portions(keys):
        pool.protect(portion, how)


def _in_portions(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]
        time.sleep(_PAUSE)

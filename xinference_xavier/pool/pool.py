"""Which slot of a replica's region holds which chunk, and who may touch it.

Every slot is in one of four states; `Pool` alone moves it between them:

    FREE → FILLING         reserve: a worker's store or a fetch will write the row
    FILLING → READY        commit: the bytes are complete; lookups hit
    FILLING → FREE         abort: the row is void, and nobody can write it any more
    FILLING → QUARANTINED  quarantine or reset: the row is void, but may still be written
    READY → FREE           eviction of an unpinned row, see `eviction.py`
    READY → FREE           sweep of an unpinned row after a flush
    READY → QUARANTINED    reset while the row is pinned
    QUARANTINED → FREE     abort by its writer, or the last unpin by its readers

Pure bookkeeping: no I/O, no clock. Every operation is O(1) per row.

Threading: the scheduler thread reserves and evicts; the background thread pins, commits and aborts.
A lock protects each operation. `lookup` takes no lock.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from xinference_xavier.pool.eviction import EvictionPolicy, SegmentedLRU


class RowState(Enum):
    FREE = auto()
    FILLING = auto()
    READY = auto()
    QUARANTINED = auto()


@dataclass(eq=False, slots=True, repr=False)
class Row:
    """One chunk in one slot. Each new chunk is a new object, so a stale handle does no harm."""

    key: bytes
    slot: int
    state: RowState = RowState.FILLING
    pins: int = 0
    checksum: int | None = None  # not shared until it is computed
    flushed: bool = False  # a hit only for lookups before the flush
    replicated_from: str | None = None  # the donor, until this row is copied itself
    origin: str | None = None  # the donor; None: computed here

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


class Pool:
    """`slots` rows; keys are vLLM's offload keys."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._lock = threading.Lock()
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[bytes, Row] = {}  # FILLING and READY
        self._idle: EvictionPolicy[Row] = SegmentedLRU(slots)  # READY and unpinned
        self._flushed: list[Row] = []
        self._pinned = 0
        self._ready = 0
        self._quarantined = 0

    # -- lookups ---------------------------------------------------------------------------

    def lookup(self, key: bytes) -> Row | None:
        """The READY row of `key`. Stays valid while only the calling thread evicts."""
        row = self._held.get(key)
        if row is None or row.state is not RowState.READY or row.flushed:
            return None
        return row

    def holds(self, key: bytes) -> bool:
        """Whether `key` is READY or FILLING."""
        return key in self._held

    def shared_keys(self) -> list[bytes]:
        """Keys of all rows that peers may fetch: READY, with a checksum."""
        with self._lock:
            return [
                row.key
                for row in self._held.values()
                if row.state is RowState.READY and row.checksum is not None and not row.flushed
            ]

    def counts(self) -> PoolCounts:
        with self._lock:
            return PoolCounts(
                rows=self.slots,
                ready=self._ready - sum(row.state is RowState.READY for row in self._flushed),
                filling=len(self._held) - self._ready,
                pinned=self._pinned,
                quarantined=self._quarantined,
            )

    # -- writing a row ---------------------------------------------------------------------

    def reserve(
        self,
        keys: Iterable[bytes],
        keep: Collection[bytes] = frozenset(),
        redundant: Callable[[Row], bool] = lambda row: False,
    ) -> Reservation:
        """Take slots for the keys that are not held, evicting other rows where necessary.

        `redundant` says whether to evict a row first; it runs under the lock and must not wait.
        The keys in `keep`, the other chunks of the same prefix, are never evicted.

        Stops at the first key without a slot: a chunk is useless without those before it.
        """
        rows: list[Row] = []
        evicted: list[bytes] = []
        with self._lock:
            for key in keys:
                if key in self._held:
                    continue
                if not self._free:
                    victim = self._idle.take(redundant, keep)
                    if victim is None:
                        break
                    self._forget(victim)
                    evicted.append(victim.key)
                row = self._held[key] = Row(key, self._free.pop())
                rows.append(row)
        return Reservation(rows, evicted)

    def _forget(self, row: Row) -> None:
        """Free an evicted row."""
        del self._held[row.key]
        self._ready -= 1
        self._free_slot(row)

    def commit(self, row: Row, checksum: int | None = None, pins: int = 0) -> bool:
        """The row's bytes are complete. False if a reset came first."""
        with self._lock:
            if row.state is not RowState.FILLING:
                return False
            row.state = RowState.READY
            row.checksum = checksum
            self._ready += 1
            if pins:
                row.pins = pins
                self._pinned += 1
            else:
                self._idle.add(row)
            return True

    def quarantine(self, row: Row) -> None:
        """Void the row; its slot may still be written."""
        with self._lock:
            if row.state is RowState.FILLING:
                del self._held[row.key]
                row.state = RowState.QUARANTINED
                self._quarantined += 1

    def abort(self, row: Row) -> None:
        """Void the row; nobody can write its slot any more. Does nothing to a READY row."""
        with self._lock:
            if row.state is RowState.FILLING:
                del self._held[row.key]
                self._free_slot(row)
            elif row.state is RowState.QUARANTINED and row.pins == 0:
                self._quarantined -= 1
                self._free_slot(row)

    def _free_slot(self, row: Row) -> None:
        row.state = RowState.FREE
        self._free.append(row.slot)

    def set_checksum(self, row: Row, checksum: int) -> bool:
        """Share the row from now on. False if it is no longer READY."""
        with self._lock:
            if row.state is not RowState.READY or row.flushed:
                return False
            row.checksum = checksum
            return True

    # -- reading a row ---------------------------------------------------------------------

    def pin(self, keys: Iterable[bytes]) -> list[Row]:
        """Pin the leading run of `keys` that is READY; a pinned row is not evicted."""
        with self._lock:
            return self._pin_run(keys, need_checksum=False)

    def pin_shared(self, keys: Iterable[bytes]) -> list[Row]:
        """Like `pin`, but only rows with a checksum, for a peer that will copy them.

        They no longer count as copies. Otherwise two replicas could each hold a copy of the
        other's row, and both could evict theirs as redundant.
        """
        with self._lock:
            run = self._pin_run(keys, need_checksum=True)
            for row in run:
                row.replicated_from = None
            return run

    def pin_row(self, row: Row) -> bool:
        """Pin this row. False if it is not READY."""
        with self._lock:
            if row.state is not RowState.READY or row.flushed:
                return False
            self._pin(row)
            return True

    def _pin(self, row: Row) -> None:
        if row.pins == 0:
            self._idle.remove(row.key)
            self._pinned += 1
        row.pins += 1

    def _pin_run(self, keys: Iterable[bytes], need_checksum: bool) -> list[Row]:
        run: list[Row] = []
        for key in keys:
            row = self._held.get(key)
            if row is None or row.state is not RowState.READY:
                break
            if need_checksum and (row.checksum is None or row.flushed):
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
                self._pinned -= 1
                if row.state is RowState.READY:
                    self._idle.add(row)
                else:  # there was a reset
                    self._quarantined -= 1
                    self._free_slot(row)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make the rows the most recently used, in the given order (the last is the newest)."""
        with self._lock:
            for key in keys:
                self._idle.touch(key)

    # -- flushing --------------------------------------------------------------------------

    def flush(self, origin: str | None = None) -> list[bytes]:
        """Make lookups miss every READY row, or those from `origin`; returns their keys.

        Any thread may call it: a row that was just looked up can still be pinned until `sweep`.
        """
        with self._lock:
            rows = [
                row
                for row in self._held.values()
                if row.state is RowState.READY and not row.flushed and origin in (None, row.origin)
            ]
            for row in rows:
                row.flushed = True
            self._flushed += rows
        return [row.key for row in rows]

    def sweep(self) -> None:
        """Free the flushed rows that are not pinned.

        The evicting thread calls it while none of its lookups waits for a pin.
        """
        if not self._flushed:
            return
        with self._lock:
            kept = []
            for row in self._flushed:
                if row.state is RowState.READY and row.pins:
                    kept.append(row)
                elif row.state is RowState.READY:
                    self._idle.remove(row.key)
                    self._forget(row)
            self._flushed = kept

    # -- resetting -------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every chunk. The slot of a FILLING or pinned row stays in quarantine until its
        writer calls `abort` or its readers call `unpin`."""
        with self._lock:
            for row in self._held.values():
                if row.state is RowState.FILLING or row.pins:
                    row.state = RowState.QUARANTINED
                    self._quarantined += 1
                else:
                    self._free_slot(row)
            self._held.clear()
            self._idle.clear()
            self._flushed.clear()
            self._ready = 0

"""The safeguards that keep rows right, each switched off by a mutation: every such run must
fail."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool, Reservation, Row, RowState


class Mutation(StrEnum):
    CHECKSUM = "checksum"
    """Consumers accept whatever arrives."""
    QUARANTINE = "quarantine"
    """The slots of an abandoned fetch are reused at once."""
    ABORT = "abort"
    """What a store that failed had reserved stays reserved."""
    PIN = "pin"
    """Rows may be evicted while they are read."""
    CANARY = "canary"
    """The canaries of all weights look alike."""
    SEQUENCE = "sequence"
    """The tracker treats any publication as the next one."""
    FIRM = "firm"
    """What is kept firmly is evicted like everything else."""


class CountingPool(Pool):
    """`refusals` counts reservations that got fewer rows than they wanted."""

    refusals = 0

    def reserve(self, keys: Iterable[bytes], *how: Any, **named: Any) -> Reservation:
        wanted = [key for key in keys if not self.holds(key)]
        reservation = super().reserve(wanted, *how, **named)
        self.refusals += len(reservation.rows) < len(wanted)
        return reservation


class _WithoutQuarantine(CountingPool):
    def quarantine(self, *rows: Row) -> None:
        self.abort(*rows)


class _WithoutAborts(CountingPool):
    def abort(self, *rows: Row) -> None:
        pass


class _WithoutPins(CountingPool):
    """Counts pins, so that each can be undone, but ignores them."""

    def commit(self, row: Row, checksum: int | None = None, pins: int = 0) -> bool:
        if not super().commit(row, checksum):
            return False
        row.pins = pins
        return True

    def _pin(self, row: Row) -> None:
        row.pins += 1

    def unpin(self, rows: Iterable[Row]) -> None:
        with self._lock:
            for row in rows:
                row.pins -= 1
                if row.state is RowState.QUARANTINED and not row.pins:
                    self._leave_quarantine(row)


class _WithoutProtection(CountingPool):
    def protect(self, keys: Iterable[bytes], how: Protection) -> None:
        pass


def make_pool(slots: int, mutation: Mutation | None) -> CountingPool:
    kinds: dict[Mutation | None, type[CountingPool]] = {
        Mutation.QUARANTINE: _WithoutQuarantine,
        Mutation.ABORT: _WithoutAborts,
        Mutation.PIN: _WithoutPins,
        Mutation.FIRM: _WithoutProtection,
    }
    return kinds.get(mutation, CountingPool)(slots)

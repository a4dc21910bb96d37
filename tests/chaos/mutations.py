"""The safeguards that keep rows right, each switched off by a mutation: every such run must
fail."""

from collections.abc import Iterable
from enum import StrEnum

from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool, Row, RowState


class Mutation(StrEnum):
    CHECKSUM = "checksum"
    """Consumers accept whatever arrives."""
    QUARANTINE = "quarantine"
    """The slots of an abandoned fetch are reused at once."""
    PIN = "pin"
    """Rows may be evicted while they are read."""
    CANARY = "canary"
    """The canaries of all weights look alike."""
    FIRM = "firm"
    """What is kept firmly is evicted like everything else."""
    LOAN = "loan"
    """What is loaded in place is granted for a moment only."""


class _WithoutQuarantine(Pool):
    def quarantine(self, *rows: Row) -> None:
        self.abort(*rows)


class _WithoutPins(Pool):
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


class _WithoutProtection(Pool):
    def protect(self, keys: Iterable[bytes], how: Protection) -> None:
        pass


def make_pool(slots: int, mutation: Mutation | None) -> Pool:
    kinds: dict[Mutation | None, type[Pool]] = {
        Mutation.QUARANTINE: _WithoutQuarantine,
        Mutation.PIN: _WithoutPins,
        Mutation.FIRM: _WithoutProtection,
    }
    return kinds.get(mutation, Pool)(slots)

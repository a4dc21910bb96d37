"""Room in the pool: reserves rows, evicts others for them, and tells the tier which.

Belongs to the scheduler thread, the only one that evicts: in its lookups, a HIT must stay one.
"""

from collections.abc import Iterable, Sequence

from xinference_xavier.pool.pool import Pool, Reservation, Row
from xinference_xavier.replica.peer_tier import PeerTier

_EVICTED_AHEAD = 128
"""Rows that a step evicts at most. It takes a tenth of a millisecond, and a step that stores as
many computes for much longer."""


class Evictor:
    def __init__(self, pool: Pool, tier: PeerTier) -> None:
        self._pool = pool
        self._tier = tier

    def reserve(self, keys: Iterable[bytes], prefix: Sequence[bytes]) -> Reservation:
        """Reserve rows for `keys` without evicting the prefix that they belong to."""
        reservation = self._pool.reserve(keys, prefix, self._is_redundant)
        self._tier.on_evicted(reservation.evicted)
        return reservation

    def evict_ahead(self) -> bool:
        """Keep a few rows free. Returns whether any was evicted."""
        evicted = self._pool.evict_ahead(_EVICTED_AHEAD, self._is_redundant)
        self._tier.on_evicted(evicted)
        return bool(evicted)

    def _is_redundant(self, row: Row) -> bool:
        """True if the donor of this copy still holds the chunk."""
        donor = row.replicated_from
        return donor is not None and bool(
            self._tier.holders(row.key) & self._tier.peers.set_of((donor,))
        )

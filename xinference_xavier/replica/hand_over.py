"""Before a replica is removed, its peers fetch what only it holds and requests used lately.

This is the mirror image of a warm join. The replica that leaves deals its chunks out, each prefix
to one peer, since a peer can use no chunk without those before it. The peers fetch them as they
fetch anything. They evict nothing for it: an engine at work keeps some rows free, and frees others
when these are filled.

Threading: the replica's background loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from xinference_xavier.mirror import Mirror
from xinference_xavier.options import MAX_DRAIN
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.tracker import pack, unpack
from xinference_xavier.replica.fetcher import Fetcher
from xinference_xavier.replica.warm_join import RecentPrompts, copy_rows
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import ask, remaining, spawn
from xinference_xavier.runtime.validate import check_count, check_identifier, check_seconds

logger = logging.getLogger(__name__)

_PATIENCE = 1.0
"""Seconds for which a peer waits for a free row."""
_GRACE = 1.0  # seconds, for a peer's answer
_FORGOTTEN = 5.0
"""Seconds after which a removal that no longer asks was given up."""


class HandOver:
    def __init__(
        self,
        *,
        incarnation: str,
        key_bytes: int,
        pool: Pool,
        mirror: Mirror,
        fetcher: Fetcher,
        recent: RecentPrompts,
    ) -> None:
        self._incarnation = incarnation
        self._key_bytes = key_bytes
        self._pool = pool
        self._mirror = mirror
        self._fetcher = fetcher
        self._recent = recent
        self._giving: asyncio.Future[None] | None = None
        self._asked = -_FORGOTTEN
        self.chunks = 0
        """How many chunks peers have fetched."""

    @property
    def under_way(self) -> bool:
        return self._giving is not None and not self._giving.done()

    def begin(self, stay: Sequence[str], seconds: float) -> None:
        """Have the peers that `stay` fetch what none of them holds. Does nothing if it was called a
        moment ago."""
        check_seconds("seconds", seconds, MAX_DRAIN + 1)
        now = time.monotonic()
        if now >= self._asked + _FORGOTTEN and not self.under_way:
            self.chunks = 0
            self._giving = spawn(self._give_all(stay, now + seconds))
        self._asked = now

    async def _give_all(self, stay: Sequence[str], deadline: float) -> None:
        shares: dict[str, list[bytes]] = {peer: [] for peer in stay if self._mirror.is_usable(peer)}
        if not shares:
            return
        others = self._mirror.sets.set_of(shares)
        for prefix in self._recent.prefixes(lambda key: self._mirror.usable_set(key) & others):
            min(shares.values(), key=len).extend(prefix)
        giving = (self._give(peer, keys, deadline) for peer, keys in shares.items() if keys)
        await asyncio.gather(*giving)

    async def _give(self, peer: str, keys: list[bytes], deadline: float) -> None:
        try:
            address = self._mirror.address(peer)
            if address is None:
                raise LookupError("it has left")
            left = remaining(deadline)
            uid, call = replica_uid(peer), (self._incarnation, pack(keys), left)
            taken = await ask(left + _GRACE, address, uid, "take_over", *call)
            check_count("chunks", taken, 0)
            self.chunks += taken
        except Exception as error:  # whatever it is, others may take theirs
            logger.warning(
                "%d chunks are not handed over: peer=%s error=%r", len(keys), peer, error
            )

    async def take(self, donor: str, packed: bytes, seconds: float) -> int:
        """Fetch the packed keys from a peer that leaves, as far as there is room; returns how many
        chunks arrived."""
        check_identifier("donor", donor)
        check_seconds("seconds", seconds, MAX_DRAIN + 1)
        keys = unpack(packed, self._key_bytes)
        deadline = time.monotonic() + seconds
        return await copy_rows(self._pool, self._fetcher, donor, keys, deadline, _PATIENCE)

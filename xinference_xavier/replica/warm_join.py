"""A new replica fetches what its peers use most, before it takes its first request.

It begins when the replica can fetch, and ends after a few seconds at the latest. Until then the
replica reports no load, so that routers leave it alone, and a launch is not ready. Where no peer
holds anything, it ends at once.

Chunks come only into free rows. They arrive most important first, and whole prefixes: what is
behind a chunk that did not arrive is not asked for.

Threading: on the replica's background loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import xoscar

from xinference_xavier.mirror.mirror import Mirror
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.hot_chunks import HotChunks, check_hot
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.fetcher import Fetcher, PeerFetch
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.stats.warm_join import WarmJoinStats
from xinference_xavier.tiers.base import FetchState

logger = logging.getLogger(__name__)

_PATIENCE = 30.0
"""Seconds until the replica can fetch; a launch waits as long."""
_CALL_TIMEOUT = 2.0
_LOOK = 0.05
MAX_PEERS = 16
"""That are asked. More of them hardly know of more that is hot."""
BATCH = 256
"""Rows of a fetch."""
_SPARE = 64
"""One row in so many stays free for the first requests."""


class Answer(NamedTuple):
    """Of a peer: its hot chunks, and their keys."""

    hot: HotChunks
    keys: list[bytes]


def chosen(answers: Mapping[str, Answer], most: int) -> dict[str, list[bytes]]:
    """The hottest `most` chunks, by the donor to fetch each from.

    Each is behind those before it in its prompt, because it is so in every answer, and because a
    donor of a chunk has those before it, too.
    """
    donors: dict[bytes, str] = {}
    uses: dict[bytes, int] = {}
    named: set[bytes] = set()
    for donor, (hot, keys) in answers.items():
        named.update(keys[: hot.named])
        for key, count in zip(keys, hot.uses, strict=True):
            donors.setdefault(key, donor)
            uses[key] = uses.get(key, 0) + count
    found: dict[str, list[bytes]] = {}
    for key in sorted(uses, key=lambda key: (key not in named, -uses[key]))[:most]:
        found.setdefault(donors[key], []).append(key)
    return found


class WarmJoin:
    """`seconds` bounds it; 0 switches it off. `can_fetch` says whether the replica knows its peers
    and has what it takes to fetch from them."""

    def __init__(
        self,
        seconds: float,
        *,
        incarnation: str,
        key_bytes: int,
        pool: Pool,
        mirror: Mirror,
        canary: Canary,
        fetcher: Fetcher,
        can_fetch: Callable[[], bool],
    ) -> None:
        self._seconds = seconds
        self._incarnation = incarnation
        self._key_bytes = key_bytes
        self._pool = pool
        self._mirror = mirror
        self._canary = canary
        self._fetcher = fetcher
        self._can_fetch = can_fetch
        self._ended = asyncio.Event()
        self._log = RateLimitedLog(logger)
        self.stats = WarmJoinStats()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> None:
        """Until it has ended, which it always does."""
        await self._ended.wait()

    async def run(self) -> None:
        try:
            if self._seconds:
                await self._run()
        except Exception:  # the replica serves all the same
            self.stats.failures += 1
            logger.exception("warm join failed: incarnation=%s", self._incarnation)
        finally:
            self._ended.set()

    async def _run(self) -> None:
        patience = time.monotonic() + _PATIENCE
        while not self._can_fetch():
            if time.monotonic() >= patience:
                logger.warning("no warm join, no fetch is possible yet: %s", self._incarnation)
                return
            await asyncio.sleep(_LOOK)
        began = time.monotonic()
        await self._join(began + self._seconds)
        self.stats.seconds = time.monotonic() - began
        if self.stats.chunks:
            logger.info(
                "warm join: incarnation=%s chunks=%d seconds=%.1f",
                self._incarnation,
                self.stats.chunks,
                self.stats.seconds,
            )

    async def _join(self, deadline: float) -> None:
        """Fetch from peers that hold something, as soon as they are known to compute alike."""
        asked: set[str] = set()
        while self._mirror.enabled and len(self._mirror) and time.monotonic() < deadline:
            new = {each for each in self._mirror.serving - asked if self._canary.trusts(each)}
            if new:
                asked |= new
                await self._fetch_hottest(new, deadline)
            elif self._mirror.peers <= asked | self._canary.differing:
                return
            else:
                await asyncio.sleep(_LOOK)

    async def _fetch_hottest(self, peers: Iterable[str], deadline: float) -> None:
        room = self._room()
        some = sorted(peers)
        random.shuffle(some)
        asking = (self._ask(peer, room) for peer in some[:MAX_PEERS])
        answers = {
            peer: answer
            for peer, answer in zip(some, await asyncio.gather(*asking), strict=False)
            if answer is not None
        }
        await asyncio.gather(
            *(self._fetch(donor, keys, deadline) for donor, keys in chosen(answers, room).items())
        )

    def _room(self) -> int:
        counts = self._pool.counts()
        used = counts.ready + counts.filling + counts.quarantined
        return max(0, counts.rows - used - counts.rows // _SPARE)

    async def _ask(self, peer: str, most: int) -> Answer | None:
        address = self._mirror.address(peer)
        if address is None:  # it has left
            return None
        try:
            actor = await within(_CALL_TIMEOUT, xoscar.actor_ref(address, replica_uid(peer)))
            answer = await within(_CALL_TIMEOUT, actor.hottest(most))
            return Answer(*check_hot(answer, self._key_bytes))
        except Exception as error:  # whatever it is, others may answer
            self.stats.failures += 1
            self._log.warn(peer, "no hot chunks: peer=%s error=%r", peer, error)
            return None

    async def _fetch(self, donor: str, keys: list[bytes], deadline: float) -> None:
        arrived: list[Row] = []
        try:
            while keys and time.monotonic() < deadline:
                rows = self._pool.reserve(keys[:BATCH], redundant=None).rows
                if not rows:
                    return  # somebody was faster, so requests come already
                for row in rows:
                    row.origin = row.replicated_from = donor
                fetch = PeerFetch(donor, rows, deadline)
                await self._fetcher.start(fetch)
                arrived += fetch.committed
                self.stats.chunks += len(fetch.committed)
                # A donor may grant less than it was asked for.
                if fetch.state is not FetchState.COMMITTED or not fetch.committed:
                    return
                keys = keys[keys.index(fetch.committed[-1].key) + 1 :]
        finally:
            self._pool.unpin(arrived)  # together, or the hottest would be the oldest

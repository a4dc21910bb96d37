"""Hot chunks, those that requests used most lately, go to a new replica and from one that leaves.

The donor names them (`RecentPrompts.hottest`), and the other one fetches them (`copy_rows`), as it
fetches anything: only into free rows, the most important ones first, and whole prefixes, since
nothing is requested behind a chunk that did not arrive.

A warm join: before its first request, a new replica asks its peers, and fetches from several at
once what none of them has brought yet. It begins when the replica can fetch, and ends after a few
seconds at the latest. Until then the replica reports no load, so that routers leave it alone, and a
launch is not ready. Where no peer holds anything, it ends at once.

A hand-over: before a replica is removed, its peers fetch what only it holds. It deals its chunks
out, each prefix to one peer, since a peer can use no chunk without those before it. The peers evict
nothing for it: an engine at work keeps some rows free, and frees others when these are filled.

`RecentPrompts` is bounded by requests, and by chunks of all of them.

Threading: the replica's background loop.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.pool.pool import PORTION, Pool, Row
from xinference_xavier.protocol.tracker import GROUP, pack, unpack
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.fetcher import Fetch, Fetcher, FetchState
from xinference_xavier.replica.kept_prefixes import KeptPrefixes, Prompt
from xinference_xavier.replica.neighbours import Neighbours
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import ask, finishing, remaining, spawn, take_all

logger = logging.getLogger(__name__)

MAX_REQUESTS = 1000
MAX_KEYS = 100_000
LEAST_USES = 2
"""What only one request had is not hot."""
_PAUSE = 1e-6  # seconds, in which other threads get Python's lock
_LOOK = 0.05
BATCH = 256
"""Rows of a fetch."""
_START_PATIENCE = 30.0
"""Seconds until a new replica can fetch; a launch waits as long."""
_CALL_TIMEOUT = 2.0
MAX_PEERS = 16
"""Most peers that a new replica asks. More of them rarely report further hot chunks."""
_SPARE = 64
"""One row in so many stays free for the first requests."""
_ROW_PATIENCE = 1.0
"""Seconds for which a peer of one that leaves waits for a free row."""
_GRACE = 1.0  # seconds, for a peer's answer
_FORGOTTEN = 5.0
"""Seconds after which a removal that no longer asks was given up."""


class RecentPrompts:
    """`finished` gets the prompts of the requests that end. The disk is told of them, too."""

    def __init__(
        self,
        pool: Pool,
        finished: deque[Prompt],
        kept: KeptPrefixes,
        disk: Disk,
    ) -> None:
        self._pool = pool
        self._finished = finished
        self._kept = kept
        self._disk = disk
        self._prompts: deque[Prompt] = deque()
        self._keys = 0

    def collect(self) -> None:
        """Call it now and then: what takes no more room is forgotten."""
        for prompt in take_all(self._finished):
            self._disk.used(prompt)
            self._prompts.append(prompt)
            self._keys += len(prompt)
        while len(self._prompts) > MAX_REQUESTS or self._keys > MAX_KEYS:
            self._keys -= len(self._prompts.popleft())

    def hottest(self, elsewhere: Callable[[bytes], object] = lambda _: False) -> dict[bytes, bytes]:
        """The hot chunks that peers may fetch and that are not `elsewhere`, the hottest first. Each
        has the first such chunk of its prompts, which is the same for all that belong together.

        Within a prompt, a chunk is never used more, or more recently, than the chunk before it. So
        each chunk is behind its predecessors, wherever the list is cut.
        """
        self.collect()
        uses: dict[bytes, int] = {}
        firsts: dict[bytes, bytes] = {}  # of the latest prompt first
        named: set[bytes] = set()

        def count(prompt: Prompt, by: int) -> None:
            first = b""
            for key in self._shared(prompt):
                if key not in uses and not elsewhere(key):
                    firsts[key] = first or key
                uses[key] = uses.get(key, 0) + by
                first = first or firsts.get(key, b"")
                if not by:
                    named.add(key)

        for prompt in reversed(self._prompts):
            count(prompt, 1)
        for prompt in self._kept.prompts():
            count(prompt, 0)
        hot = [key for key in firsts if key in named or uses[key] >= LEAST_USES]
        hot.sort(key=lambda key: (key not in named, -uses[key]))
        return {key: firsts[key] for key in hot}

    def _shared(self, prompt: Prompt) -> Iterator[bytes]:
        """The run of chunks of each group that peers may fetch. Where the model looks back only so
        far, it may begin behind the prompt's start."""
        begun: set[bytes] = set()
        ended: set[bytes] = set()
        for number, key in enumerate(prompt):
            if number % PORTION == 0:
                time.sleep(_PAUSE)
            group, row = key[GROUP], self._pool.lookup(key)
            if group in ended:
                continue
            if row is not None and row.checksum is not None:
                begun.add(group)
                yield key
            elif group in begun:
                ended.add(group)


async def copy_rows(
    fetcher: Fetcher,
    donor: str,
    keys: list[bytes],
    deadline: float,
    *,
    patience: float = 0.0,
    spare: int = 0,
) -> int:
    """Fetch the chunks of `keys` that the pool lacks, in order, into free rows, of which `spare`
    stay free; returns how many arrived. Ends when no row has been free for `patience` seconds. If
    the caller is cancelled, it goes on: rows may be written until their fetch has ended."""
    return await finishing(_copy_rows(fetcher, donor, keys, deadline, patience, spare))


async def _copy_rows(
    fetcher: Fetcher, donor: str, keys: list[bytes], deadline: float, patience: float, spare: int
) -> int:
    pool, arrived = fetcher.pool, list[Row]()
    patient = time.monotonic() + patience
    try:
        while keys and time.monotonic() < deadline:
            batch = keys[: min(BATCH, _free(pool, spare))]
            rows = pool.reserve(batch, redundant=None).rows
            if not rows:
                asked, keys = keys, [key for key in keys if not pool.holds(key)]
                if len(keys) < len(asked):
                    continue
                if time.monotonic() >= patient:
                    break
                await asyncio.sleep(_LOOK)
                continue
            for row in rows:
                row.origin = row.replicated_from = donor
            fetch = Fetch(donor, rows, deadline)
            await fetcher.start(fetch)
            arrived += fetch.committed
            # A donor may grant less than it was asked for.
            if fetch.state is not FetchState.COMMITTED or not fetch.committed:
                break
            keys = keys[keys.index(fetch.committed[-1].key) + 1 :]
            patient = time.monotonic() + patience
    finally:
        pool.unpin(arrived)  # together, or the hottest would be the oldest
    return len(arrived)


def _free(pool: Pool, spare: int) -> int:
    counts = pool.counts()
    return max(0, counts.rows - counts.ready - counts.filling - counts.quarantined - spare)


class HotChunks:
    """A replica's part in all copies: `join` when it is new, `take_over` when a peer leaves, and
    `leave` when it leaves itself. `joined` is set when `join` has ended, however."""

    def __init__(
        self,
        *,
        incarnation: str,
        key_bytes: int,
        index: Index[Peers],
        fetcher: Fetcher,
        neighbours: Neighbours,
        process: TransferProcess,
        recent: RecentPrompts,
    ) -> None:
        self._incarnation = incarnation
        self._key_bytes = key_bytes
        self._index = index
        self._peers = index.members
        self._fetcher = fetcher
        self._neighbours = neighbours
        self._process = process
        self._recent = recent
        self.joined = asyncio.Event()
        self._leaving: asyncio.Future[None] | None = None
        self._asked = -_FORGOTTEN
        self.handed_over = 0
        """How many chunks peers have fetched."""

    # -- a new replica ------------------------------------------------------------------------

    async def join(self, seconds: float) -> None:
        """Fetch what peers use most, for at most so many `seconds`; 0 switches it off."""
        try:
            if seconds and await self._can_fetch():
                began = time.monotonic()
                if chunks := await self._join(began + seconds):
                    text = "warm join: incarnation=%s chunks=%d seconds=%.1f"
                    logger.info(text, self._incarnation, chunks, time.monotonic() - began)
        except Exception:  # the replica serves all the same
            logger.exception("warm join failed: incarnation=%s", self._incarnation)
        finally:
            self.joined.set()

    async def _can_fetch(self) -> bool:
        patience = time.monotonic() + _START_PATIENCE
        while not (self._index.epoch and self._process.ready):
            if time.monotonic() >= patience:
                logger.warning("no warm join, no fetch is possible yet: %s", self._incarnation)
                return False
            await asyncio.sleep(_LOOK)
        return True

    async def _join(self, deadline: float) -> int:
        """Fetch from peers that hold something, as soon as they are known to compute alike. What
        neighbours hold is loaded in place."""
        asked, chunks, settled = set[str](), 0, self._neighbours.is_settled
        while self._peers.enabled and time.monotonic() < deadline:
            peers = self._peers
            if not self._index.epoch:  # the tracker has sent us to another namespace
                await asyncio.sleep(_LOOK)
            elif not len(self._index) or peers.members <= asked | peers.unlike:
                break
            elif new := {*filter(settled, peers.serving & peers.trusted - asked)}:
                asked |= new
                new = {name for name in new if not self._neighbours.lends(name)}
                some = random.sample(sorted(new), min(len(new), MAX_PEERS))
                copies = (self._fetch_hottest(peer, deadline) for peer in some)
                chunks += sum(await asyncio.gather(*copies))
            else:
                await asyncio.sleep(_LOOK)
        return chunks

    async def _fetch_hottest(self, peer: str, deadline: float) -> int:
        try:
            packed = await self._ask(peer, _CALL_TIMEOUT, "hottest")
            keys = unpack(packed, self._key_bytes)
        except Exception as error:  # whatever it is, others may answer
            logger.warning("no hot chunks: peer=%s error=%r", peer, error)
            return 0
        # Where no row is free, others were faster, or requests come already.
        spare = self._fetcher.pool.slots // _SPARE
        return await copy_rows(self._fetcher, peer, keys, deadline, spare=spare)

    # -- one that leaves, and its peers -------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """True while a hand-over is under way."""
        return self._leaving is not None and not self._leaving.done()

    def leave(self, stay: Sequence[str], seconds: float) -> None:
        """Have the peers that `stay` fetch what none of them holds. Does nothing if it was called a
        moment ago."""
        now = time.monotonic()
        if now >= self._asked + _FORGOTTEN and not self.leaving:
            self.handed_over = 0
            self._leaving = spawn(self._leave(stay, now + seconds))
        self._asked = now

    async def _leave(self, stay: Sequence[str], deadline: float) -> None:
        shares: dict[str, list[bytes]] = {peer: [] for peer in stay if self._peers.is_usable(peer)}
        if not shares:
            return
        others = self._peers.set_of(shares)
        rare = self._recent.hottest(lambda key: self._index.usable_set(key) & others)
        takers: dict[bytes, str] = {}  # by the first chunk of a prefix
        for key, first in rare.items():
            if first not in takers:
                takers[first] = min(shares, key=lambda peer: len(shares[peer]))
            shares[takers[first]].append(key)
        giving = (self._hand_over(peer, keys, deadline) for peer, keys in shares.items() if keys)
        await asyncio.gather(*giving)

    async def _hand_over(self, peer: str, keys: list[bytes], deadline: float) -> None:
        try:
            left = remaining(deadline)
            call = "take_over", self._incarnation, pack(keys), left
            taken = await self._ask(peer, left + _GRACE, *call)
            self.handed_over += taken  # only now: other peers have taken theirs meanwhile
        except Exception as error:  # whatever it is, others may take theirs
            logger.warning(
                "%d chunks are not handed over: peer=%s error=%r", len(keys), peer, error
            )

    async def take_over(self, donor: str, packed: bytes, seconds: float) -> int:
        """Fetch the packed keys from a peer that leaves, as far as there is room; returns how many
        chunks arrived."""
        keys = unpack(packed, self._key_bytes)
        deadline = time.monotonic() + seconds
        return await copy_rows(self._fetcher, donor, keys, deadline, patience=_ROW_PATIENCE)

    async def _ask(self, peer: str, seconds: float, method: str, *arguments: object) -> Any:
        """Raises whatever the call raises; LookupError if the peer is gone."""
        address = self._peers.address(peer)
        if address is None:
            raise LookupError("it has left")
        return await ask(seconds, address, replica_uid(peer), method, *arguments)

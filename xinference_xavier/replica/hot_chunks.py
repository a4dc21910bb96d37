"""Hot chunks, those that requests used most lately, go to a new replica and from one that leaves.

A warm join: before its first request, a new replica fetches what its peers use most. It begins when
the replica can fetch, and ends after a few seconds at the latest. Until then the replica reports no
load, so that routers leave it alone, and a launch is not ready. Where no peer holds anything, it
ends at once. Chunks go only into free rows. They arrive most important first, and as whole
prefixes: nothing is requested behind a chunk that did not arrive.

A hand-over is its mirror image: before a replica is removed, its peers fetch what only it holds. It
deals its chunks out, each prefix to one peer, since a peer can use no chunk without those before
it. The peers fetch them as they fetch anything. They evict nothing for it: an engine at work keeps
some rows free, and frees others when these are filled.

`RecentPrompts` finds them: which chunks of a pool the latest requests used most. It is bounded by
requests, and by chunks of all of them.

Threading: the replica's background loop.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import PORTION, Pool, Row
from xinference_xavier.protocol.tracker import GROUP, pack, unpack
from xinference_xavier.protocol.transfer import MAX_HOT, HotChunks, unpack_hot
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.fetcher import Fetch, Fetcher, FetchState
from xinference_xavier.replica.kept_prefixes import KeptPrefixes
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import ask, finishing, remaining, spawn, take_all
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

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

Prompt = Sequence[bytes]
"""The keys of a prompt's chunks, group by group."""


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

    def hottest(self, most: int) -> HotChunks:
        """The hottest `most` chunks that peers may fetch.

        Within a prompt, a chunk is never used more, or more recently, than the chunk before it. So
        the list has each chunk behind its predecessors, wherever it is cut.
        """
        found, uses, named = self._hot()
        del found[min(most, MAX_HOT) :]
        return HotChunks(
            pack(found), tuple(uses[key] for key in found), sum(key in named for key in found)
        )

    def prefixes(self, elsewhere: Callable[[bytes], object]) -> Iterable[list[bytes]]:
        """The hot chunks that are not `elsewhere`, the hottest first, by the first such chunk of
        their prompts: what prompts share is in one list with what follows it."""
        found, _, _ = self._hot()
        rare = {key: not elsewhere(key) for key in found}
        firsts: dict[bytes, bytes] = {}
        for prompt in (*self._prompts, *self._kept.prompts()):
            first = b""
            for key in self._shared(prompt):
                if rare.get(key):
                    first = first or firsts.get(key, key)
                    firsts.setdefault(key, first)
        prefixes: dict[bytes, list[bytes]] = {}
        for key in filter(firsts.__contains__, found):
            prefixes.setdefault(firsts[key], []).append(key)
        return prefixes.values()

    def _hot(self) -> tuple[list[bytes], dict[bytes, int], set[bytes]]:
        """The hottest chunks first, how many prompts had each, and which are named."""
        self.collect()
        uses: dict[bytes, int] = {}  # of the latest prompt first
        for prompt in reversed(self._prompts):
            for key in self._shared(prompt):
                uses[key] = uses.get(key, 0) + 1
        named = {key for prompt in self._kept.prompts() for key in self._shared(prompt)}
        for prompt in self._kept.prompts():
            uses.update((key, 0) for key in prompt if key in named and key not in uses)
        found = [key for key, count in uses.items() if key in named or count >= LEAST_USES]
        found.sort(key=lambda key: (key not in named, -uses[key]))
        return found, uses, named

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


class Answer(NamedTuple):
    """A peer's hot chunks, and their keys."""

    hot: HotChunks
    keys: list[bytes]


def chosen(answers: Mapping[str, Answer], most: int) -> dict[str, list[bytes]]:
    """The hottest `most` chunks, by the donor to fetch each from.

    Each chunk comes behind its predecessors in the prompt, as in every answer, and because a donor
    of a chunk has its predecessors, too.
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


async def copy_rows(
    fetcher: Fetcher, donor: str, keys: list[bytes], deadline: float, patience: float = 0.0
) -> int:
    """Fetch the chunks of `keys` that the pool lacks, in order, into free rows; returns how many
    arrived. Ends when no row has been free for `patience` seconds. If the caller is cancelled, it
    goes on: rows may be written until their fetch has ended."""
    return await finishing(_copy_rows(fetcher, donor, keys, deadline, patience))


async def _copy_rows(
    fetcher: Fetcher, donor: str, keys: list[bytes], deadline: float, patience: float
) -> int:
    pool, arrived = fetcher.pool, list[Row]()
    patient = time.monotonic() + patience
    try:
        while keys and time.monotonic() < deadline:
            rows = pool.reserve(keys[:BATCH], redundant=None).rows
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


class WarmJoin:
    """A new replica's part. `seconds` bounds it; 0 switches it off. `ended` is set even if it
    fails."""

    def __init__(
        self,
        seconds: float,
        *,
        incarnation: str,
        key_bytes: int,
        pool: Pool,
        mirror: Mirror,
        fetcher: Fetcher,
        process: TransferProcess,
    ) -> None:
        self._seconds = seconds
        self._incarnation = incarnation
        self._key_bytes = key_bytes
        self._pool = pool
        self._mirror = mirror
        self._fetcher = fetcher
        self._process = process
        self.ended = asyncio.Event()
        self._log = RateLimitedLog(logger)
        self._chunks = 0  # that it fetched

    async def run(self) -> None:
        try:
            if self._seconds:
                await self._run()
        except Exception:  # the replica serves all the same
            logger.exception("warm join failed: incarnation=%s", self._incarnation)
        finally:
            self.ended.set()

    async def _run(self) -> None:
        patience = time.monotonic() + _START_PATIENCE
        while not (self._mirror.epoch and self._process.ready):
            if time.monotonic() >= patience:
                logger.warning("no warm join, no fetch is possible yet: %s", self._incarnation)
                return
            await asyncio.sleep(_LOOK)
        began = time.monotonic()
        await self._join(began + self._seconds)
        if self._chunks:
            logger.info(
                "warm join: incarnation=%s chunks=%d seconds=%.1f",
                self._incarnation,
                self._chunks,
                time.monotonic() - began,
            )

    async def _join(self, deadline: float) -> None:
        """Fetch from peers that hold something, as soon as they are known to compute alike."""
        asked: set[str] = set()
        while self._mirror.enabled and len(self._mirror) and time.monotonic() < deadline:
            peers = self._mirror.peers
            if new := peers.serving & self._mirror.trusted - asked:
                asked |= new
                await self._fetch_hottest(new, deadline)
            elif peers.members <= asked | self._mirror.unlike:
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
        # Where no row is free, somebody was faster, so requests come already.
        copying = (
            copy_rows(self._fetcher, donor, keys, deadline)
            for donor, keys in chosen(answers, room).items()
        )
        self._chunks += sum(await asyncio.gather(*copying))

    def _room(self) -> int:
        counts = self._pool.counts()
        used = counts.ready + counts.filling + counts.quarantined
        return max(0, counts.rows - used - counts.rows // _SPARE)

    async def _ask(self, peer: str, most: int) -> Answer | None:
        address = self._mirror.peers.address(peer)
        if address is None:  # it has left
            return None
        try:
            hot: HotChunks = await ask(_CALL_TIMEOUT, address, replica_uid(peer), "hottest", most)
            return Answer(hot, unpack_hot(hot, self._key_bytes))
        except Exception as error:  # whatever it is, others may answer
            self._log.warn(peer, "no hot chunks: peer=%s error=%r", peer, error)
            return None


class HandOver:
    """The part of a replica that leaves (`begin`), and that of its peers (`take`)."""

    def __init__(
        self,
        *,
        incarnation: str,
        key_bytes: int,
        mirror: Mirror,
        fetcher: Fetcher,
        recent: RecentPrompts,
    ) -> None:
        self._incarnation = incarnation
        self._key_bytes = key_bytes
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
        now = time.monotonic()
        if now >= self._asked + _FORGOTTEN and not self.under_way:
            self.chunks = 0
            self._giving = spawn(self._give_all(stay, now + seconds))
        self._asked = now

    async def _give_all(self, stay: Sequence[str], deadline: float) -> None:
        shares: dict[str, list[bytes]] = {peer: [] for peer in stay if self._mirror.is_usable(peer)}
        if not shares:
            return
        others = self._mirror.peers.set_of(shares)
        for prefix in self._recent.prefixes(lambda key: self._mirror.usable_set(key) & others):
            min(shares.values(), key=len).extend(prefix)
        giving = (self._give(peer, keys, deadline) for peer, keys in shares.items() if keys)
        await asyncio.gather(*giving)

    async def _give(self, peer: str, keys: list[bytes], deadline: float) -> None:
        try:
            address = self._mirror.peers.address(peer)
            if address is None:
                raise LookupError("it has left")
            left = remaining(deadline)
            uid, call = replica_uid(peer), (self._incarnation, pack(keys), left)
            taken: int = await ask(left + _GRACE, address, uid, "take_over", *call)
            self.chunks += taken  # only now: other peers have taken theirs meanwhile
        except Exception as error:  # whatever it is, others may take theirs
            logger.warning(
                "%d chunks are not handed over: peer=%s error=%r", len(keys), peer, error
            )

    async def take(self, donor: str, packed: bytes, seconds: float) -> int:
        """Fetch the packed keys from a peer that leaves, as far as there is room; returns how many
        chunks arrived."""
        keys = unpack(packed, self._key_bytes)
        deadline = time.monotonic() + seconds
        return await copy_rows(self._fetcher, donor, keys, deadline, _ROW_PATIENCE)

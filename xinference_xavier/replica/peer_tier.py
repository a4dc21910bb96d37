"""The tier of peers, with or without the host's disk: everything that the scheduler thread may ask
of a replica.

Threading: the scheduler thread calls the methods that `Tier` declares, which return at once and
post slow work to the replica's background loop. The loop opens and closes the tier.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from xinference_xavier.disk import Place
from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.tier import DISK, Claim, Fetch, Tier
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.donor import Checksums
from xinference_xavier.replica.fetcher import Fetcher
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import MAX_QUEUED
from xinference_xavier.replica.tracker_client import TrackerClient
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.aio import spawn

MAX_BACKLOG = 10_000  # posted actions that may wait for the background loop
GATHER = 0.1
"""Seconds between two publications of stored rows, at least. What is stored meanwhile is published
together: most of what a publication costs does not depend on how many chunks it has. What follows a
quiet time, such as the next step of a long prompt, is published at once."""


class Background:
    """The way from the scheduler thread to the background loop, and what the loop does with what
    it finds there. `refused` counts what was dropped because the loop was too far behind."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: TrackerClient,
        process: TransferProcess,
        fetcher: Fetcher,
        checksums: Checksums,
        canary: Canary,
        namespace: SharedNamespace,
    ) -> None:
        self.client = client
        self.process = process
        self.fetcher = fetcher
        self.canary = canary
        self.namespace = namespace
        self.refused = 0
        self._loop = loop
        self._checksums = checksums
        # Not withdrawn yet. It overflows only if the loop hangs: then our lease expires anyway.
        self._evicted: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._stored: deque[Row] = deque()  # not offered yet
        self._gathering = False  # the loop will take them
        self._taken = -GATHER  # when it last did
        self._posted = 0  # by the scheduler thread
        self._handled = 0  # by the loop

    # -- called by the scheduler thread ---------------------------------------------------------

    def stored(self, rows: Sequence[Row]) -> None:
        if len(self._stored) + len(rows) > MAX_QUEUED:  # the loop hangs
            self.refused += 1
            return
        self._stored.extend(rows)
        if not self._gathering:
            self._gathering = True  # first: the loop may take them before `post` returns
            if not self.post(self._gather):
                self._gathering = False

    def evicted(self, keys: Sequence[bytes]) -> None:
        self._evicted.extend(keys)

    def post(self, action: Callable[..., object], *args: object) -> bool:
        """Let the loop run `action`; False if it has ended."""
        try:
            self._loop.call_soon_threadsafe(action, *args)
        except RuntimeError:  # just now
            return False
        return True

    def post_if_room(self, action: Callable[..., object], *args: object) -> bool:
        """Post work that can be dropped. False if the loop is too far behind, or has ended."""
        if self._posted - self._handled >= MAX_BACKLOG:
            self.refused += 1
            return False
        self._posted += 1
        return self.post(self._handle, action, args)

    # -- called by the loop ---------------------------------------------------------------------

    def withdraw_evicted(self) -> None:
        """Tell the tracker which chunks were evicted."""
        # It may grow meanwhile.
        evicted = [self._evicted.popleft() for _ in range(len(self._evicted))]
        if evicted:
            self.client.publisher.enqueue(evicted, held=False)

    def release(self, claim: Claim) -> None:
        self._take_stored()  # or a peer that asks now would compute them again
        spawn(self.client.release(claim))

    def _gather(self) -> None:
        """Take what is stored as soon as enough time has passed."""
        due = self._taken + GATHER
        if self._loop.time() < due:
            self._loop.call_at(due, self._take_stored)
        else:
            self._take_stored()

    def _take_stored(self) -> None:
        self._gathering = False
        self._taken = self._loop.time()
        # It may grow meanwhile. What is taken here must not be withdrawn afterwards for an eviction
        # before it.
        stored = [self._stored.popleft() for _ in range(len(self._stored))]
        self.withdraw_evicted()
        if stored:
            self._checksums.add(stored)

    def _handle(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._handled += 1
        self.withdraw_evicted()  # first: the action may publish one of them again
        action(*args)


class PeerTier(Tier):
    """Closed, it is as if there were no peers."""

    def __init__(self, pool: Pool, mirror: Mirror) -> None:
        self.pool = pool
        self.mirror = mirror
        self.holders = mirror.usable_set
        self._background: Background | None = None  # while it is open

    # -- called by the background loop ----------------------------------------------------------

    def open(self, background: Background) -> None:
        self._background = background

    def close(self) -> None:
        self._background = None

    # -- called by the scheduler thread ---------------------------------------------------------

    @property
    def sharing(self) -> bool:
        """False while it is closed, and while a reset is under way."""
        background = self._background
        return background is not None and background.namespace.is_settled

    @property
    def reaches_peers(self) -> bool:
        """Whether rows can be fetched from peers."""
        background = self._background
        return (
            background is not None and background.namespace.is_settled and background.process.ready
        )

    @property
    def ready(self) -> bool:
        return self.reaches_peers

    def run(self, keys: Sequence[bytes], among: int) -> tuple[int, int]:
        return self.mirror.usable_run(keys, among)

    def sources(self, holders: int) -> list[str]:
        return self.mirror.sets.names(holders)

    def set_of(self, sources: Iterable[str]) -> int:
        return self.mirror.sets.set_of(sources)

    def can_load_from(self, source: str) -> bool:
        return self.reaches_peers and self.mirror.is_usable(source)

    def on_stored(self, rows: Sequence[Row]) -> None:
        """Compute the rows' checksums and publish them, within `GATHER` seconds."""
        if (background := self._background) is not None:
            background.stored(rows)

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        """Withdraw the chunks with the next store or fetch, or within a second.

        Until then a peer that asks for them is granted only the chunks before them.
        """
        if (background := self._background) is not None:
            background.evicted(keys)

    def submit_load(self, source: str, rows: list[Row], deadline: float) -> Fetch | None:
        if (background := self._background) is not None:
            fetch = Fetch(source, rows, deadline)
            if background.post_if_room(background.fetcher.start, fetch):
                return fetch
        for row in rows:
            self.pool.abort(row)
        return None

    def claim(self, keys: Sequence[bytes], seconds: float) -> Claim | None:
        background = self._background
        if background is None or not (self.reaches_peers and self.mirror.enabled):
            return None
        if not self.mirror.peers or not background.canary.trusts_all:
            return None
        claim = Claim(keys, seconds)
        asked = background.post_if_room(lambda: spawn(background.client.claim(claim)))
        return claim if asked else None

    def release_claim(self, claim: Claim) -> None:
        if (background := self._background) is not None:
            background.post_if_room(background.release, claim)

    def reset(self) -> None:
        """Void all chunks, and isolate the replica until it is told its weights' version."""
        background = self._background
        if background is not None:
            background.namespace.announce_reset()
        self.pool.reset()
        if background is not None:
            background.post(background.canary.reset)
            background.post(lambda: spawn(background.namespace.isolate()))

    def rejoin(self, weights_version: str) -> None:
        if (background := self._background) is not None:
            namespace, resets = background.namespace, background.namespace.announced
            background.post(lambda: spawn(namespace.rejoin(weights_version, resets)))


class DiskTier(PeerTier):
    """The peers, and the disk. In a set of sources, bit 0 is the disk, and the others are those of
    the mirror."""

    def __init__(self, pool: Pool, mirror: Mirror, disk: Disk) -> None:
        super().__init__(pool, mirror)
        self.disk = disk
        self.holders = self._holders

    @property
    def ready(self) -> bool:
        return bool(self._saved) or self.reaches_peers

    def run(self, keys: Sequence[bytes], among: int) -> tuple[int, int]:
        peers = among >> 1 if self.reaches_peers else 0
        count, peers = self.mirror.usable_run(keys, peers)
        saved = len([*takewhile(self._saved.__contains__, keys)]) if among & 1 else 0
        if max(count, saved) == 0:
            return 0, among
        return max(count, saved), (peers << 1) * (count >= saved) | (saved >= count)

    def sources(self, holders: int) -> list[str]:
        return self.mirror.sets.names(holders >> 1) + [DISK] * (holders & 1)

    def set_of(self, sources: Iterable[str]) -> int:
        names = [*sources]
        return self.mirror.sets.set_of(names) << 1 | (DISK in names)

    @property
    def _saved(self) -> Mapping[bytes, Place]:
        """What can be read from the disk now."""
        return self.disk.index if self.sharing and self.mirror.enabled else {}

    def reset(self) -> None:
        if (background := self._background) is not None:
            background.post(self.disk.reset)
        super().reset()

    def _holders(self, key: bytes) -> int:
        peers = self.mirror.usable_set(key)
        if peers and not self.reaches_peers:
            peers = 0
        return peers << 1 | (key in self._saved)

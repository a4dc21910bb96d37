"""The tier of peers and the host's disk: everything that the scheduler thread may ask of a replica.

Threading: the scheduler thread calls methods that return at once and post slow work to the
replica's background loop. The loop opens and closes the tier.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from xinference_xavier.disk_store import Store
from xinference_xavier.index import Index
from xinference_xavier.limits import LIMIT
from xinference_xavier.peers import DISK_BIT, Peers
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.disk import Disk, NoDisk
from xinference_xavier.replica.donor import Checksums
from xinference_xavier.replica.fetcher import Fetch, Fetcher
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import MAX_QUEUED
from xinference_xavier.replica.tracker_client import Claim, TrackerClient
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.aio import spawn, take_all

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
        self.checksums = checksums
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

    def post(self, action: Callable[..., object], *args: object) -> bool:
        """Let the loop run `action`; False if it has ended."""
        try:
            self._loop.call_soon_threadsafe(action, *args)
        except RuntimeError:  # just now
            return False
        return True

    def post_if_room(self, action: Callable[..., object], *args: object) -> bool:
        """Post work that can be dropped. False if the loop is too far behind, or has ended."""
        if self._posted - self._handled >= LIMIT:
            self.refused += 1
            return False
        self._posted += 1
        return self.post(self._handle, action, args)

    # -- called by the loop ---------------------------------------------------------------------

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
        # What is taken here must not be withdrawn afterwards for an eviction before it.
        stored = take_all(self._stored)
        self.client.publisher.withdraw_evicted()
        if stored:
            self.checksums.add(stored)

    def _handle(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._handled += 1
        self.client.publisher.withdraw_evicted()  # first: the action may publish one of them again
        action(*args)


class PeerTier:
    """What rows can be filled from: the peers and the host's disk. Closed, it is as if there were
    neither.

    Sets of sources are those of `Peers`; they and their names belong together for one scheduling
    step.
    """

    def __init__(self, pool: Pool, index: Index[Peers], disk: Disk) -> None:
        self.pool = pool
        self.index = index
        self.peers = index.members
        self.disk = disk
        self.holders = index.usable_set if isinstance(disk, NoDisk) else self._holders
        """The sources that hold a chunk. Only a hint: a stale one costs a failed fetch. One more
        call would take as long as the lookup."""
        self._background: Background | None = None  # while it is open

    # -- called by the background loop ----------------------------------------------------------

    def open(self, background: Background) -> None:
        self._background = background

    def close(self) -> None:
        """Fetches under way end by their deadlines."""
        self._background = None

    # -- called by the scheduler thread ---------------------------------------------------------

    @property
    def sharing(self) -> bool:
        """False while it is closed, and while a reset is under way."""
        background = self._background
        return background is not None and background.namespace.resets_done

    @property
    def reaches_peers(self) -> bool:
        """True if rows can be fetched from peers."""
        background = self._background
        return self.sharing and background is not None and background.process.ready

    @property
    def saved(self) -> Store | tuple[bytes, ...]:
        """What can be read from the disk now."""
        return self.disk.index if self.sharing and self.peers.enabled else ()

    @property
    def ready(self) -> bool:
        """True if `holders` and `submit_load` may be used."""
        return self.reaches_peers or bool(self.saved)

    def is_near(self, key: bytes) -> bool:
        """True if a neighbour holds the chunk: one of them is enough for a host."""
        near = self.peers.neighbours
        return bool(near and self.index.usable_set(key) & near)

    def run(self, keys: Sequence[bytes], among: int) -> tuple[int, int]:
        """The number of leading `keys` that one source of the set `among` holds, and the set of
        sources that hold all of them: `among` if the number is 0."""
        count, peers = self.index.usable_run(keys, among if self.reaches_peers else 0)
        if not (among & DISK_BIT and (saved := self.saved)):
            return count, peers if count else among
        read = len([*takewhile(saved.__contains__, keys)])
        if max(count, read) == 0:
            return 0, among
        return max(count, read), peers * (count >= read) | DISK_BIT * (read >= count)

    def can_load_from(self, peer: str) -> bool:
        """True if `peer` is there now and may be loaded from, if it holds anything."""
        return self.reaches_peers and self.peers.is_usable(peer)

    def on_stored(self, rows: Sequence[Row]) -> None:
        """The engine stored these rows: compute their checksums and publish them, within `GATHER`
        seconds."""
        if (background := self._background) is not None:
            background.stored(rows)

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        """Withdraw the chunks with the next store or fetch, or within a second.

        Until then a peer that asks for them is granted only the chunks before them.
        """
        if (background := self._background) is not None:
            background.client.publisher.evicted(keys)

    def submit_load(self, source: str, rows: list[Row], deadline: float) -> Fetch | None:
        """Begin to fill the reserved rows from `source`. Returns None, with the rows aborted, if
        the tier is closed or overloaded."""
        if (background := self._background) is not None:
            fetch = Fetch(source, rows, deadline)
            if background.post_if_room(background.fetcher.start, fetch):
                return fetch
        for row in rows:
            self.pool.abort(row)
        return None

    def claim(self, keys: Sequence[bytes], seconds: float) -> Claim | None:
        """Ask whether a peer is computing the chunks; None if there is nobody to ask."""
        background = self._background
        if background is None or not (self.reaches_peers and self.peers.enabled):
            return None
        if not self.peers.trusted:
            return None
        claim = Claim(keys, seconds)
        asked = background.post_if_room(lambda: spawn(background.client.claim(claim)))
        return claim if asked else None

    def release_claim(self, claim: Claim) -> None:
        """The request behind the claim has ended."""
        if (background := self._background) is not None:
            background.post_if_room(background.release, claim)

    def reset(self) -> None:
        """The engine's weights may have changed: void all chunks, and isolate the replica until it
        is told its weights' version."""
        background = self._background
        if background is not None:
            background.namespace.announce_reset()
        self.pool.reset()
        if background is not None:
            background.post(self.disk.reset)
            background.post(background.canary.reset)
            background.post(lambda: spawn(background.namespace.isolate()))

    def rejoin(self, weights_version: str) -> None:
        """Share with the replicas of these weights, to which everything since `reset` belongs."""
        if (background := self._background) is not None:
            namespace, resets = background.namespace, background.namespace.announced
            background.post(lambda: spawn(namespace.rejoin(weights_version, resets)))

    def _holders(self, key: bytes) -> int:
        peers = self.index.usable_set(key) if self.reaches_peers else 0
        return peers | DISK_BIT * (key in self.saved)

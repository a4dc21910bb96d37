"""The tier of peers: everything that the scheduler thread may ask of a replica.

Threading: the scheduler thread calls the methods that `Tier` declares, which return at once and
post slow work to the replica's background loop. The loop calls the other methods.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.tier import Claim, Fetch, Tier
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.donor import Checksums
from xinference_xavier.replica.fetcher import Fetcher, PeerFetch
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


class PeerTier(Tier):
    """`refused` counts the actions dropped because the background loop was too far behind."""

    def __init__(self, pool: Pool, mirror: Mirror, namespace: SharedNamespace) -> None:
        self._mirror = mirror
        self.holders = mirror.usable_set
        self.refused = 0
        self._pool = pool
        self._namespace = namespace
        # Not withdrawn yet. It overflows only if the loop hangs: then our lease expires anyway.
        self._evicted: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._stored: deque[Row] = deque()  # not offered yet
        self._gathering = False  # the loop will take them
        self._taken = -GATHER  # when it last did
        self._posted = 0  # by the scheduler thread
        self._handled = 0  # by the background loop
        self._open = False
        self._loop: asyncio.AbstractEventLoop
        self._client: TrackerClient
        self._process: TransferProcess
        self._fetcher: Fetcher
        self._checksums: Checksums
        self._canary: Canary

    # -- called by the background loop ----------------------------------------------------------

    def open(
        self,
        client: TrackerClient,
        process: TransferProcess,
        fetcher: Fetcher,
        checksums: Checksums,
        canary: Canary,
    ) -> None:
        """Accept work for the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._client, self._process = client, process
        self._fetcher, self._checksums, self._canary = fetcher, checksums, canary
        self._open = True

    def close(self) -> None:
        self._open = False

    def withdraw_evicted(self) -> None:
        """Tell the tracker which chunks were evicted."""
        # It may grow meanwhile.
        evicted = [self._evicted.popleft() for _ in range(len(self._evicted))]
        if evicted:
            self._client.publisher.enqueue(evicted, held=False)

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

    def _release(self, claim: Claim) -> None:
        self._take_stored()  # or a peer that asks now would compute them again
        spawn(self._client.release(claim))

    # -- called by the scheduler thread ---------------------------------------------------------

    @property
    def sharing(self) -> bool:
        """False before `open`, after `close` and while a reset is under way."""
        return self._open and self._namespace.is_settled

    @property
    def ready(self) -> bool:
        return self.sharing and self._process.ready

    def run(self, keys: Sequence[bytes], among: int) -> tuple[int, int]:
        return self._mirror.usable_run(keys, among)

    def sources(self, holders: int) -> list[str]:
        return self._mirror.sets.names(holders)

    def set_of(self, sources: Iterable[str]) -> int:
        return self._mirror.sets.set_of(sources)

    def can_load_from(self, source: str) -> bool:
        return self.ready and self._mirror.is_usable(source)

    def on_stored(self, rows: Sequence[Row]) -> None:
        """Compute the rows' checksums and publish them, within `GATHER` seconds."""
        if len(self._stored) + len(rows) > MAX_QUEUED:  # the loop hangs
            self.refused += 1
            return
        self._stored.extend(rows)
        if not self._gathering:
            self._gathering = True  # first: the loop may take them before `_post` returns
            if not self._post(self._gather):
                self._gathering = False

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        """Withdraw the chunks with the next store or fetch, or within a second.

        Until then a peer that asks for them is granted only the chunks before them.
        """
        self._evicted.extend(keys)

    def submit_load(
        self,
        source: str,
        rows: list[Row],
        deadline: float,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Fetch | None:
        fetch = PeerFetch(source, rows, deadline, trace_headers)
        if self._post_if_room(self._fetcher.start, fetch):
            return fetch
        for row in rows:
            self._pool.abort(row)
        return None

    def claim(self, keys: Sequence[bytes], seconds: float) -> Claim | None:
        if not (self._mirror.enabled and self._mirror.peers and self._canary.trusts_all):
            return None
        claim = Claim(keys, seconds)
        asked = self._post_if_room(lambda: spawn(self._client.claim(claim)))
        return claim if asked else None

    def release_claim(self, claim: Claim) -> None:
        self._post_if_room(self._release, claim)

    def reset(self) -> None:
        """Void all chunks, and isolate the replica until it is told its weights' version."""
        self._namespace.announce_reset()
        self._pool.reset()
        self._post(self._canary.reset)
        self._post(lambda: spawn(self._namespace.isolate()))

    def _post(self, action: Callable[..., object], *args: object) -> bool:
        """Run `action` on the background loop; False if the loop has ended."""
        if not self._open:
            return False
        try:
            self._loop.call_soon_threadsafe(action, *args)
        except RuntimeError:  # the loop ended just now
            return False
        return True

    def _post_if_room(self, action: Callable[..., object], *args: object) -> bool:
        """Post work that can be dropped. False if the loop is too far behind, or has ended."""
        if self._posted - self._handled >= MAX_BACKLOG:
            self.refused += 1
            return False
        self._posted += 1
        return self._post(self._handle, action, args)

    def _handle(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._handled += 1
        self.withdraw_evicted()  # first: the action may publish one of them again
        action(*args)

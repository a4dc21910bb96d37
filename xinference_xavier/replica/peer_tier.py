"""Peers as a place to load chunks from: all that the scheduler thread may ask of a replica.

Threading: the scheduler thread calls everything here but `open` and `close`, and each call returns
at once. What takes longer is left to the background loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.replica.checksums import Checksums
from xinference_xavier.replica.fetcher import Fetch, Fetcher
from xinference_xavier.replica.mirror import Mirror
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.publisher import MAX_QUEUED
from xinference_xavier.replica.tracker_client import Claim, TrackerClient
from xinference_xavier.replica.transfer_process import TransferProcess

MAX_BACKLOG = 10_000
"""Actions that the background loop may be behind by."""


class PeerTier:
    """`mirror` says which peer holds a chunk. `refused` counts what the background loop was too far
    behind for."""

    def __init__(self, pool: Pool, mirror: Mirror, namespace: SharedNamespace) -> None:
        self.mirror = mirror
        self.refused = 0
        self._pool = pool
        self._namespace = namespace
        # Evicted, not withdrawn yet. Those beyond are of a loop that stands still: its membership
        # ends, and with it what the tracker knows.
        self._gone: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._posted = 0  # by the scheduler thread; so many of them
        self._handled = 0  # by the background loop
        self._open = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._client: TrackerClient
        self._process: TransferProcess
        self._fetcher: Fetcher
        self._checksums: Checksums

    # -- called by the background loop ----------------------------------------------------------

    def open(
        self,
        client: TrackerClient,
        process: TransferProcess,
        fetcher: Fetcher,
        checksums: Checksums,
    ) -> None:
        """From now on, work can be left to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._client, self._process = client, process
        self._fetcher, self._checksums = fetcher, checksums
        self._open = True

    def close(self) -> None:
        self._open = False

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run it on the loop, and keep it from being collected."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def withdraw_evicted(self) -> None:
        """Tell the tracker of the chunks that are gone."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]  # more may come meanwhile
        if gone:
            self._client.withdraw(gone)

    # -- called by the scheduler thread ---------------------------------------------------------

    @property
    def sharing(self) -> bool:
        """Whether there are peers to share with: not while a reset is on its way."""
        return self._open and self._namespace.is_settled

    @property
    def can_fetch(self) -> bool:
        """Whether the mirror may be asked for donors."""
        return self.sharing and self._process.ready

    def stored(self, rows: Sequence[Row]) -> None:
        """These rows are READY: sum them up and offer them."""
        self._post_if_room(self._checksums.add, rows)

    def evicted(self, keys: Sequence[bytes]) -> None:
        """These chunks are gone.

        That wakes nobody: the tracker is told with what is stored or fetched next, or within a
        second. A peer that asks for one meanwhile is granted what comes before it.
        """
        self._gone.extend(keys)

    def fetch(
        self,
        donor: str,
        rows: list[Row],
        deadline: float,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Fetch | None:
        """Begin to bring the rows, which the caller reserved, from `donor`, in the trace of the
        request whose headers these are.

        None, and the rows are free again, when the background loop has ended or is far behind.
        """
        fetch = Fetch(donor, rows, deadline, trace_headers)
        if self._post_if_room(self._fetcher.start, fetch):
            return fetch
        for row in rows:
            self._pool.abort(row)
        return None

    def claim(self, keys: Sequence[bytes], seconds: float) -> Claim:
        """Ask who computes the chunks of a prefix, in their order, which takes about so long."""
        claim = Claim(keys, seconds)
        if not self._post_if_room(lambda: self.spawn(self._client.claim(claim))):
            claim.held_by_peer = 0
        return claim

    def release_claim(self, claim: Claim) -> None:
        """The request that was to compute this has ended."""
        self._post_if_room(lambda: self.spawn(self._client.release(claim)))

    def reset(self) -> None:
        """Everything computed so far is void, here and, coming from us, anywhere else.

        From now on we share only in a namespace of our own, until somebody says which version our
        weights are.
        """
        self._namespace.announce_reset()
        self._pool.reset()
        self.post(lambda: self.spawn(self._namespace.isolate()))

    def post(self, action: Callable[..., object], *args: object) -> bool:
        """Have the background loop do something soon; False if it has ended."""
        if not self._open:
            return False
        try:
            self._loop.call_soon_threadsafe(action, *args)
        except RuntimeError:  # it ended just now
            return False
        return True

    def _post_if_room(self, action: Callable[..., object], *args: object) -> bool:
        """What can be done without: not shared, not told to others, or not fetched. False, and
        counted, while the background loop is too far behind."""
        if self._posted - self._handled >= MAX_BACKLOG:
            self.refused += 1
            return False
        self._posted += 1
        return self.post(self._handle, action, args)

    def _handle(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._handled += 1
        self.withdraw_evicted()  # first: the action may bring one of them back
        action(*args)

"""A fetch: a transaction that copies rows from a donor's pool, or the disk, into ours, or leaves no
trace.

Threading: the scheduler thread reserves the rows, makes a `Fetch` and reads its `state`; everything
else happens on the replica's background loop. From then on only the fetch writes the rows, until it
commits them, pinned once, or aborts them. It ends by its deadline even if they may still be
written: those stay in quarantine until the transfer process is done with them.
"""

import asyncio
import itertools
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import xoscar

from xinference_xavier.errors import REFUSALS, GrantRefusedError, XavierError
from xinference_xavier.index import Index
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.peers import DISK, IN_PLACE, SHARED_MEMORY, Peer, Peers
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.sketches import Difference
from xinference_xavier.protocol.transfer import (
    PROTOCOL_VERSION,
    Grant,
    GrantRequest,
    PullOrder,
    PullResult,
    check_grant,
    check_slots,
)
from xinference_xavier.replica.canary import Audited, Canary
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.neighbours import Neighbour, Neighbours
from xinference_xavier.replica.reports import EventReporter, Publisher
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import UNREACHABLE, Rollback, in_thread, spawn, within
from xinference_xavier.runtime.backoff import Backoff
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.stats.schema import FetchStats, ReplicaFetches

logger = logging.getLogger(__name__)

_REPORT_TIME = 0.1  # seconds before the deadline, left for the report of the rows that arrived
LOAN_LOOK = 0.02
"""Seconds between two looks whether vLLM has loaded what a neighbour lends. A load takes a tenth of
a second, and a neighbour that has lent half of its pool lends no other rows meanwhile."""


class FetchState(Enum):
    PENDING = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


@dataclass(eq=False)
class Fetch:
    """One load of rows from one source.

    `deadline` is in `time.monotonic()` seconds. Once the fetch has ended, `seconds` is its
    duration, and `reason` says why it was rolled back.
    """

    source: str
    rows: list[Row]
    deadline: float
    began: float = field(default_factory=time.monotonic)
    transport: str = ""  # until one is chosen
    committed: list[Row] = field(default_factory=list)  # the leading rows that arrived, pinned once
    reason: str | None = None
    seconds: float = 0.0
    state: FetchState = FetchState.PENDING
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def in_place(self) -> bool:
        """True if a neighbour lends the rows."""
        return self.rows[0].is_lent


@dataclass
class FetchCounts:
    fetches: ReplicaFetches = field(default_factory=ReplicaFetches)
    rows: int = 0  # from peers
    in_flight: Counter[str] = field(default_factory=Counter)  # rows by source


class Fetcher:
    """Runs fetches; one per replica, on its background loop."""

    def __init__(
        self,
        *,
        pool: Pool,
        row_bytes: int,
        process: TransferProcess,
        neighbours: Neighbours,
        namespace: SharedNamespace,
        index: Index[Peers],
        disk: Disk,
        publisher: Publisher,
        events: EventReporter,
        canary: Canary,
    ) -> None:
        self.pool = pool
        self._row_bytes = row_bytes
        self._process = process
        self._neighbours = neighbours
        self._numbers = itertools.count()
        self._namespace = namespace
        self._index = index
        self._peers = index.members
        self._disk = disk
        self._publisher = publisher
        self._events = events
        self._canary = canary
        self._conditions = RateLimitedLog(logger)
        self.counts = FetchCounts()

    def start(self, fetch: Fetch) -> asyncio.Future[None]:
        """Begin a fetch. The future is done when it has ended."""
        self.counts.fetches.started += 1
        self.counts.in_flight[fetch.source] += len(fetch.rows)
        return spawn(self._run(fetch))

    async def _run(self, fetch: Fetch) -> None:
        reason: str | None = "stopped"  # if the replica stops and cancels this task
        peer = self._peers.get(fetch.source)
        try:
            async with Rollback() as scope:
                scope.undo(self.pool.abort, *fetch.rows)  # does nothing to committed ones
                # Its rows may have been reserved since the pool was reset, and for the namespace
                # of before.
                if not self._namespace.resets_done:
                    raise GrantRefusedError("reset")
                if fetch.source == DISK:
                    reason = await self._read(fetch)
                else:
                    if peer is None or peer.address is None:
                        raise GrantRefusedError("donor gone")
                    grant, release = await self._grant(fetch, peer, scope)
                    self._record_missing(fetch, grant)
                    if not grant.slots:
                        raise GrantRefusedError("not held")
                    if fetch.in_place:
                        reason = self._borrow(fetch, peer, grant, release)
                        scope.commit()
                    else:
                        reason = await self._pull(fetch, peer, grant)
        except GrantRefusedError as error:
            # A peer must not be able to add a counter per text of its choice.
            reason = error.reason if error.reason in REFUSALS else "refused"
        except TimeoutError:
            reason = "timeout"
        except (XavierError, *UNREACHABLE) as error:
            self._conditions.warn(
                fetch.source, "fetch failed: donor=%s error=%r", fetch.source, error
            )
            reason = "donor unreachable"
        except Exception:  # the request must not wait for a fetch that is over
            self._conditions.warn(
                "error", "fetch failed: donor=%s", fetch.source, level=logging.ERROR, exc_info=True
            )
            reason = "internal error"
        finally:  # after the rollback, so that no row is half done when the fetch ends
            self._finish(fetch, reason)

    async def _grant(
        self, fetch: Fetch, peer: Peer, scope: Rollback
    ) -> tuple[Grant, Callable[[], None]]:
        """The grant, and how to release it. That is done at the end of the scope, even if the
        answer does not arrive."""
        if peer.name not in self._peers.trusted:
            raise GrantRefusedError("not compared")
        number = next(self._numbers)
        request = GrantRequest(
            PROTOCOL_VERSION,
            self._namespace.current,
            self._peers.incarnation,
            number,
            tuple(row.key for row in fetch.rows),
            fetch.in_place,
        )
        try:
            if peer.actor is None:
                finding = xoscar.actor_ref(peer.address, replica_uid(peer.name))
                peer.actor = await within(fetch.deadline - time.monotonic(), finding)
            # The peer may be looked for again meanwhile, after another call has failed.
            release = partial(self._release, peer.name, peer.actor, number)
            scope.undo(release)
            asking = peer.actor.grant(request)
            grant: Grant = await within(fetch.deadline - time.monotonic(), asking)
        except GrantRefusedError:
            raise
        except (XavierError, *UNREACHABLE):
            peer.actor = None  # to be looked for again
            raise
        check_grant(grant, len(fetch.rows))
        return grant, release

    def _record_missing(self, fetch: Fetch, grant: Grant) -> None:
        held = len(grant.checksums)
        if held < len(fetch.rows) and not grant.more_is_held:
            self._index.record_stale(fetch.rows[held].key, fetch.source, grant.sequence)

    def _borrow(
        self, fetch: Fetch, peer: Peer, grant: Grant, release: Callable[[], None]
    ) -> str | None:
        """The rows can be loaded from where they are. Returns why not all of them; None if they
        can. Raises GrantRefusedError."""
        fetch.transport = IN_PLACE
        neighbour = self._neighbours.get(peer.name)
        if neighbour is None or not neighbour.in_place:  # any more
            raise GrantRefusedError("donor gone")
        if self._peers.differs(peer.name):
            raise GrantRefusedError("not compared")
        check_slots(grant.slots, neighbour.rows)
        neighbour.loans += 1
        for row, slot in zip(fetch.rows, grant.slots, strict=False):
            row.slot = neighbour.first + slot
            if self.pool.commit(row, pins=1):
                fetch.committed.append(row)
        self.pool.abort(*fetch.rows)
        self._count_received(fetch, peer)
        spawn(self._until_returned(fetch, neighbour, grant, release))
        return None if len(fetch.committed) == len(grant.slots) else "reset"

    async def _until_returned(
        self, fetch: Fetch, neighbour: Neighbour, grant: Grant, release: Callable[[], None]
    ) -> None:
        """Keep the grant as long as vLLM may load its rows. One of them is verified meanwhile. If
        the replica stops, nothing is released: the engine may still load."""
        try:
            await self._verify(fetch, grant)
        except Exception:  # the grant must end all the same
            self._conditions.warn("verify", "no row was verified", exc_info=True)
        while True:
            await asyncio.sleep(LOAN_LOOK)
            if not any(row.pins for row in fetch.rows):
                break
        neighbour.loans -= 1
        release()

    async def _verify(self, fetch: Fetch, grant: Grant) -> None:
        """A row that is not what was granted is like a failed audit."""
        if fetch.committed:
            keys = (row.key for row in fetch.rows)
            checksums = dict(zip(keys, grant.checksums, strict=False))
            row = random.choice(fetch.committed)
            found = await in_thread(self._neighbours.checksum, row.slot, row.key)
            if found != checksums[row.key]:
                self._canary.take(Audited(fetch.source, Difference("a checksum", math.inf)))

    async def _read(self, fetch: Fetch) -> str | None:
        """Like `_pull`, from the disk."""
        fetch.transport = DISK
        checksums: list[int] = []
        reading = self._disk.read(fetch.rows, checksums)
        return await self._receive(fetch, None, checksums, reading)

    async def _pull(self, fetch: Fetch, peer: Peer, grant: Grant) -> str | None:
        """Returns why not all granted rows were committed; None if they were. Raises
        GrantRefusedError as `_receive`."""
        rows = fetch.rows[: len(grant.checksums)]
        now = time.monotonic()
        remaining = fetch.deadline - now
        patience = max(0.001, remaining - min(_REPORT_TIME, remaining / 10))
        neighbour = self._neighbours.get(peer.name)
        if neighbour is not None:
            fetch.transport = SHARED_MEMORY
            until = min(now + patience, grant.expires)
            work = self._neighbours.copy(neighbour, rows, grant.slots, grant.checksums, until)
            return await self._receive(fetch, peer, grant.checksums, work)
        order = PullOrder(
            peer.name,
            grant.endpoint,
            grant.slots,
            grant.expires,
            tuple(row.key for row in rows),
            grant.checksums,
            tuple(row.slot for row in rows),
            patience,
        )
        fetch.transport = peer.linked_by
        work = self._process.pull(order)
        return await self._receive(fetch, peer, grant.checksums, work)

    async def _receive(
        self,
        fetch: Fetch,
        peer: Peer | None,
        checksums: Sequence[int],
        work: Awaitable[PullResult],
    ) -> str | None:
        """Wait until the rows are there, or the deadline is over. Returns why not all of them were
        committed; None if they were. Raises GrantRefusedError if the tracker has found meanwhile
        that the peer computes other rows."""
        pulling = asyncio.ensure_future(work)
        try:
            await asyncio.wait({pulling}, timeout=fetch.deadline - time.monotonic())
        except asyncio.CancelledError:  # the replica stops
            pulling.cancel()
            await asyncio.wait({pulling})  # until then, rows may be written
            raise
        if not pulling.done():
            self.pool.quarantine(*fetch.rows)
            self._finish(fetch, "timeout")
        result = await pulling
        if result.transport is not None:
            fetch.transport = result.transport
            if peer is not None:
                peer.linked_by = result.transport
        if fetch.state is not FetchState.PENDING:
            return fetch.reason
        if peer is not None and self._peers.differs(peer.name):
            raise GrantRefusedError("not compared")
        reason = self._commit(fetch, peer, checksums, result)
        if len(fetch.committed) == len(fetch.rows):
            self._finish(fetch, reason)  # at once: only the grant is left to release
        return reason

    def _commit(
        self, fetch: Fetch, peer: Peer | None, checksums: Sequence[int], result: PullResult
    ) -> str | None:
        verified = zip(fetch.rows[: result.verified], checksums, strict=False)
        fetch.committed = [
            row for row, checksum in verified if self.pool.commit(row, checksum, pins=1)
        ]
        if peer is not None:
            self._count_received(fetch, peer)
        self._publisher.withdraw_evicted()  # first: one of them may have come back
        self._publisher.enqueue([row.key for row in fetch.committed], held=True)
        if len(fetch.committed) < result.verified:
            return "reset"
        return result.reason

    def _count_received(self, fetch: Fetch, peer: Peer) -> None:
        self.counts.rows += len(fetch.committed)
        peer.received += len(fetch.committed)

    def _finish(self, fetch: Fetch, reason: str | None) -> None:
        if fetch.state is not FetchState.PENDING:
            return
        self.counts.in_flight[fetch.source] -= len(fetch.rows)
        if not self.counts.in_flight[fetch.source]:
            del self.counts.in_flight[fetch.source]
        fetch.reason = reason
        fetch.seconds = time.monotonic() - fetch.began
        self._measure(fetch)
        fetches = self.counts.fetches
        if reason is None:
            fetches.committed += 1
            fetch.state = FetchState.COMMITTED
        else:
            fetches.rolled_back[reason] = fetches.rolled_back.get(reason, 0) + 1
            fetch.state = FetchState.ROLLED_BACK
            self._events.rolled_back(fetch.source, reason, len(fetch.rows), len(fetch.committed))
        fetch.ended.set()

    def _measure(self, fetch: Fetch) -> None:
        size = len(fetch.committed) * self._row_bytes
        stats = self.counts.fetches.by_transport.setdefault(fetch.transport, FetchStats())
        stats.ended(fetch.reason, fetch.seconds, size)

    def _release(self, donor: str, actor: xoscar.ActorRefType, number: int) -> None:
        """Release the grant in the background: nothing here depends on it."""
        spawn(self._send_release(donor, actor, number))

    async def _send_release(self, donor: str, actor: xoscar.ActorRefType, number: int) -> None:
        """What is copied expires anyway. A neighbour keeps what is loaded in place until it gets
        the message."""
        backoff = Backoff()
        while True:
            try:
                await within(CALL_DEADLINE, actor.release(self._peers.incarnation, number))
                return
            except UNREACHABLE as error:
                self._conditions.warn(
                    "release", "grant not released yet: donor=%s error=%r", donor, error
                )
            neighbour = self._neighbours.get(donor)
            if neighbour is None or neighbour.is_gone:
                return
            await asyncio.sleep(backoff.pause())

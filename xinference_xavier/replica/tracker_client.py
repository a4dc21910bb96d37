"""A replica's side of the tracker: keeps its index current and its holdings published.

Threading: the replica's background loop. Any thread may read the index.

Life cycle: `run` serves one session after the other until it is cancelled or the replica leaves.

    locate → join → publish all holdings → { watch, heartbeat, publish, compare,
                                             report whether it serves }
       ↑______________ wait a little ← any failure ______________|

The tracker may be away, hang, lose its memory or come back elsewhere; meanwhile the index stays.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotFoundError
from xinference_xavier.index import Index
from xinference_xavier.limits import CALL_DEADLINE, LONGEST
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.tracker import (
    MAX_REPORTED,
    PROTOCOL_VERSION,
    Comparison,
    JoinReply,
    Member,
    NotMemberError,
    Update,
    pack_short,
    tracker_uid,
)
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import (
    ClientCounts,
    EventReporter,
    Identity,
    LoadReporter,
    Publisher,
)
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import reachable_address
from xinference_xavier.runtime.aio import spawn, within
from xinference_xavier.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

_WORKER_UID = "worker"


@dataclass(eq=False)
class Claim:
    """A prefix that a request wants to compute: `keys` in order, in about `seconds`.

    `held_by_peer` is how many of the first keys a peer is computing: 0 if this replica should
    compute them, None until the answer arrives. Any thread reads it.
    """

    keys: Sequence[bytes]
    seconds: float
    held_by_peer: int | None = None


class TrackerLocation:
    """The tracker's address: first the configured one, later the one that our worker's supervisor
    names. The supervisor creates a new tracker if necessary."""

    def __init__(self, config: XavierConfig) -> None:
        self._config = config
        self._is_first = True

    async def find(self) -> str:
        """Return the address of the tracker's pool. Raises whatever the calls to worker and
        supervisor raise."""
        is_first, self._is_first = self._is_first, False
        if is_first or self._config.worker_address is None:
            return self._config.tracker
        worker = await xoscar.actor_ref(self._config.worker_address, _WORKER_UID)
        supervisor = await worker.get_supervisor_ref(add_worker=False)
        try:
            address: str = await supervisor.xavier_tracker_address(
                self._config.model_uid, True, self._config.hooks
            )
        except NotFoundError:
            # A restarted supervisor knows no model until its workers register again, which they do
            # only every 15 s. If ours has registered already, this does nothing.
            await worker.get_supervisor_ref(add_worker=True)
            return self._config.tracker
        return reachable_address(address, via=supervisor.address)


LEAVE_DEADLINE = 1.0
CLAIM_DEADLINE = 0.5
PIECE_PAUSE = 0.001
"""Seconds between two pieces of an update: a waiting thread wakes and takes Python's lock."""
CLAIM_FACTOR = 4.0  # a claim lasts this many times as long as computing is expected to take
MAX_BACKOFF = 2.0  # seconds before the next session
_HEARTBEATS_PER_LEASE = 5


HEARTBEAT = 2.0
"""Seconds between two heartbeats, at most: there are five in a tracker's lease."""
WATCH = 10.0
"""Seconds that a watch waits for changes."""


class TrackerClient:
    """Membership of one replica.

    `process` gets the model's secret at every join, before peers learn the holdings. The tracker is
    told at once whether it is ready, because peers can fetch only then. What `events` has pending
    is removed once delivered.

    `secret` is the model's; None before the first join, a new one after the tracker was lost.
    `joined` is set while the replica is a member that has published its holdings.
    """

    def __init__(
        self,
        identity: Identity,
        location: TrackerLocation,
        *,
        index: Index[Peers],
        namespace: SharedNamespace,
        canary: Canary,
        publisher: Publisher,
        process: TransferProcess,
        events: EventReporter,
        load_reporter: LoadReporter,
    ) -> None:
        self.secret: bytes | None = None
        self.joined = asyncio.Event()
        self.counts = ClientCounts()
        self.publisher = publisher
        self._identity = identity
        self._incarnation = identity.incarnation
        self._location = location
        self._index = index
        self._peers = index.members
        self._namespace = namespace
        self._canary = canary
        self._process = process
        self._events = events
        self._load_reporter = load_reporter
        self._tracker: Any = None
        self._leaving = asyncio.Event()

    # What the replica calls

    async def run(self, address: str, stats: Callable[[], dict[str, object]]) -> None:
        """Be a member until cancelled or `leave` is called. The replica's actor is at `address`;
        `stats` are its figures, JSON-able."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(most=MAX_BACKOFF, jitter=True)
        while not self._leaving.is_set():
            started, namespace = loop.time(), self._namespace.current
            await self._namespace.run_session(partial(self._run_session, address, stats))
            if loop.time() - started > MAX_BACKOFF:
                backoff.reset()
            if namespace == self._namespace.current:
                with suppress(TimeoutError):
                    await within(backoff.pause(), self._leaving.wait())

    async def claim(self, claim: Claim) -> None:
        """Ask the tracker who computes `claim`. Without an answer in time, it is ours."""
        held_by_peer = 0
        try:
            if self.joined.is_set():
                seconds = min(CLAIM_FACTOR * claim.seconds, LONGEST)
                call = self._call(self._namespace.current, "claim", pack_short(claim.keys), seconds)
                held_by_peer = await within(CLAIM_DEADLINE, call)
        except Exception:
            self.counts.claim_failures += 1
        finally:
            claim.held_by_peer = held_by_peer

    async def release(self, claim: Claim) -> None:
        """End our claim: the keys are computed, or will not be."""
        try:
            if self.joined.is_set():
                await self._call(self._namespace.current, "release", pack_short(claim.keys))
        except Exception:  # the tracker will end it
            self.counts.claim_failures += 1

    async def leave(self) -> None:
        """Stop being a member, within a second; `run` returns."""
        self._leaving.set()
        await self._namespace.end_session()
        await self._send_leave()

    # A session

    async def _run_session(
        self, address: str, stats: Callable[[], dict[str, object]], namespace: str
    ) -> None:
        # Its transfer process learns the secret from the join, so it serves nobody yet.
        member = Member(self._incarnation, address, serves=False)
        try:
            lease = await self._join(namespace, member)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(namespace))
                tasks.create_task(self._send_heartbeats(namespace, lease, stats))
                tasks.create_task(self.publisher.run(partial(self._call, namespace)))
                tasks.create_task(self._tell_serving(namespace))
                tasks.create_task(self._compare(namespace))
                tasks.create_task(self._load_reporter.run(partial(self._call, namespace)))
        except Exception as error:
            self.counts.failures += 1
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._events.tracker_session(cause)
        finally:
            self.joined.clear()

    async def _join(self, namespace: str, member: Member) -> float:
        """Return the lease, in seconds."""
        address = await within(3 * CALL_DEADLINE, self._location.find())
        uid = tracker_uid(self._identity.model_uid)
        self._tracker = await within(CALL_DEADLINE, xoscar.actor_ref(address=address, uid=uid))
        settings, report = self._peers.settings, self._canary.report
        self._canary.changed.clear()
        call = self._tracker.join(
            namespace,
            member,
            settings,
            self._identity.replica,
            PROTOCOL_VERSION,
            report,
        )
        reply: JoinReply = await within(CALL_DEADLINE, call)
        self._canary.judged(namespace, report, reply.comparison)
        self._peers.expect(reply.epoch, reply.lease)
        self.publisher.last_sequence = max(self.publisher.last_sequence, reply.sequence)
        spawn(self._process.configure(reply.secret))
        await self.publisher.send_holdings(partial(self._call, namespace))
        self.secret = reply.secret
        self.joined.set()
        self._events.tracker_session(None)
        return reply.lease

    async def _watch(self, namespace: str) -> None:
        index, timeout = self._index, WATCH
        while True:
            update: Update = await self._call(
                namespace, "watch", index.epoch, index.revision, timeout, wait=timeout
            )
            for _ in index.apply_in_pieces(update):
                self._canary.peers_changed()  # who differs comes first: a snapshot takes seconds
                await asyncio.sleep(PIECE_PAUSE)
            self._peers.forget_absent()
            self._canary.peers_changed()

    async def _send_heartbeats(
        self, namespace: str, lease: float, stats: Callable[[], dict[str, object]]
    ) -> None:
        while True:
            pending = self._events.pending
            events = tuple(pending)[:MAX_REPORTED]
            if not await self._call(namespace, "heartbeat", self._current(stats), events):
                raise NotMemberError(f"the tracker does not know {self._incarnation!r}; join again")
            for event in events:  # a full deque may have dropped the oldest meanwhile
                if pending and pending[0] is event:
                    pending.popleft()
            await asyncio.sleep(min(HEARTBEAT, lease / _HEARTBEATS_PER_LEASE))

    async def _tell_serving(self, namespace: str) -> None:
        while True:
            self._process.ready_changed.clear()
            await self._call(namespace, "set_serving", self._process.ready)
            await self._process.ready_changed.wait()

    async def _compare(self, namespace: str) -> None:
        while True:
            await self._canary.changed.wait()
            self._canary.changed.clear()
            report = self._canary.report
            found: Comparison = await self._call(namespace, "compare", report)
            self._canary.judged(namespace, report, found)

    async def _call(self, namespace: str, method: str, *args: Any, wait: float = 0.0) -> Any:
        """Call a method of the tracker, which may take `wait` seconds longer than others."""
        call = getattr(self._tracker, method)(namespace, self._incarnation, *args)
        return await within(CALL_DEADLINE + wait, call)

    # Around the sessions

    def _current(self, stats: Callable[[], dict[str, object]]) -> dict[str, object]:
        try:
            return stats()
        except Exception:
            self.counts.stats_failures += 1
            if self.counts.stats_failures == 1:
                logger.exception("stats failed: incarnation=%s", self._incarnation)
            return {}

    async def _send_leave(self) -> None:
        if self._tracker is None:
            return
        try:
            call = self._tracker.leave(self._namespace.current, self._incarnation)
            await within(LEAVE_DEADLINE, call)
        except Exception as error:
            self.counts.failures += 1
            logger.info(
                "no answer to leaving, the lease will expire: incarnation=%s error=%r",
                self._incarnation,
                error,
            )

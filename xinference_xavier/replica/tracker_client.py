"""A replica's side of the tracker: keeps its mirror current and its holdings published.

Threading: the replica's background loop. Any thread may read the mirror.

Life cycle: `run` serves one session after the other until it is cancelled or the replica leaves.

    locate → join → publish all holdings → { watch, heartbeat, publish, compare,
                                             report whether it serves }
       ↑______________ wait a little ← any failure ______________|

The tracker may be away, hang, lose its memory or come back elsewhere; meanwhile the mirror stays.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotFoundError
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.tracker import (
    MAX_CLAIM_SECONDS,
    MAX_REPORTED,
    PROTOCOL_VERSION,
    Comparison,
    JoinReply,
    Member,
    NotMemberError,
    Update,
    pack,
    tracker_uid,
)
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.reports import (
    ClientCounts,
    EventReporter,
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
    """First the configured address; later the one that our worker's supervisor names. The
    supervisor creates a new tracker if necessary."""

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


CALL_DEADLINE = 5.0  # seconds for a call to the tracker; a watch gets its waiting time on top
LOCATE_DEADLINE = 15.0
"""Seconds to find the tracker: it may take calls to the worker and to the supervisor."""
LEAVE_DEADLINE = 1.0
CLAIM_DEADLINE = 0.5
PIECE_PAUSE = 0.001
"""Seconds between two pieces of an update: a waiting thread wakes and takes Python's lock."""
CLAIM_FACTOR = 4.0  # a claim lasts this many times as long as computing is expected to take
MIN_BACKOFF, MAX_BACKOFF = 0.1, 2.0  # seconds before the next session
_HEARTBEATS_PER_LEASE = 5


class TrackerClient:
    """Membership of one replica.

    - `replica` is the name that it keeps over its incarnations.
    - `locate` returns the address of the tracker's pool, or raises while there is no tracker.
    - `canary` has what the tracker is to compare.
    - `process` gets the model's secret at every join, before peers learn the holdings. The tracker
      is told at once whether it is ready, because peers can fetch only then.
    - `events` hears of sessions; what it has pending is removed once delivered.
    - `stats` returns the replica's stats, JSON-able.
    - `on_members` receives who the peers are, whenever that changes.
    - `heartbeat`, at most a fifth of the tracker's lease, and `watch_timeout` are in seconds.

    `secret` is the model's; None before the first join, a new one after the tracker was lost.
    `namespace` is the one to be in. `joined` is set while the replica is a member that has
    published its holdings.
    """

    def __init__(
        self,
        *,
        model_uid: str,
        incarnation: str,
        namespace: str,
        key_bytes: int,
        locate: Callable[[], Awaitable[str]],
        mirror: Mirror,
        canary: Canary,
        publisher: Publisher,
        process: TransferProcess,
        events: EventReporter,
        load_reporter: LoadReporter,
        stats: Callable[[], dict[str, object]],
        on_members: Callable[[frozenset[str]], None],
        replica: str = "",
        heartbeat: float = 2.0,
        watch_timeout: float = 10.0,
    ) -> None:
        self.mirror = mirror
        self.secret: bytes | None = None
        self.joined = asyncio.Event()
        self.counts = ClientCounts()
        self.publisher = publisher
        self._model_uid = model_uid
        self._incarnation = incarnation
        self._canary = canary
        self.namespace = namespace
        self._key_bytes = key_bytes
        self._locate = locate
        self._heartbeat = heartbeat
        self._watch_timeout = watch_timeout
        self._process = process
        self.events = events
        self._load_reporter = load_reporter
        self._stats = stats
        self._on_members = on_members
        self._known: frozenset[str] = frozenset()
        self._replica = replica
        self._retry_now = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._tracker: Any = None
        self._leaving = False

    # What the replica calls

    async def run(self, address: str) -> None:
        """Be a member until cancelled or `leave` is called. The replica's actor is at `address`."""
        # Its transfer process learns the secret from the join, so it serves nobody yet.
        member = Member(self._incarnation, address, serves=False)
        loop = asyncio.get_running_loop()
        backoff = Backoff(MIN_BACKOFF, MAX_BACKOFF, jitter=True)
        while not self._leaving:
            started = loop.time()
            self._retry_now.clear()
            self._session = asyncio.create_task(self._run_session(self.namespace, member))
            try:
                await asyncio.wait({self._session})
            finally:
                await self._end_session()
            if loop.time() - started > MAX_BACKOFF:
                backoff.reset()
            with suppress(TimeoutError):
                await within(backoff.pause(), self._retry_now.wait())

    async def claim(self, claim: Claim) -> None:
        """Ask the tracker who computes `claim`. Without an answer in time, it is ours."""
        held_by_peer = 0
        try:
            if self.joined.is_set():
                seconds = min(CLAIM_FACTOR * claim.seconds, MAX_CLAIM_SECONDS)
                held_by_peer = await within(
                    CLAIM_DEADLINE, self._call(self.namespace, "claim", pack(claim.keys), seconds)
                )
        except Exception:
            self.counts.claim_failures += 1
        finally:
            claim.held_by_peer = held_by_peer

    async def release(self, claim: Claim) -> None:
        """End our claim: the keys are computed, or will not be."""
        try:
            if self.joined.is_set():
                await self._call(self.namespace, "release", pack(claim.keys))
        except Exception:  # the tracker will end it
            self.counts.claim_failures += 1

    async def change_namespace(self, namespace: str) -> None:
        """Leave the current namespace and join another as soon as the tracker answers. On return
        the mirror holds nothing of the old namespace and will not again."""
        old, self.namespace = self.namespace, namespace
        await self._end_session()
        self.mirror.clear()
        self._tell_members()
        await self._send_leave(old, moving=True)
        self._retry_now.set()

    async def leave(self) -> None:
        """Stop being a member, within a second; `run` returns."""
        self._leaving = True
        await self._end_session()
        self._retry_now.set()
        await self._send_leave(self.namespace)

    # A session

    async def _run_session(self, namespace: str, member: Member) -> None:
        try:
            lease = await self._join(namespace, member)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(namespace))
                tasks.create_task(self._send_heartbeats(namespace, lease))
                tasks.create_task(self.publisher.run(partial(self._call, namespace)))
                tasks.create_task(self._tell_serving(namespace))
                tasks.create_task(self._compare(namespace))
                tasks.create_task(self._load_reporter.run(partial(self._call, namespace)))
        except Exception as error:
            self.counts.failures += 1
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self.events.tracker_session(cause)

    async def _join(self, namespace: str, member: Member) -> float:
        """Return the lease, in seconds."""
        address = await within(LOCATE_DEADLINE, self._locate())
        uid = tracker_uid(self._model_uid)
        self._tracker = await within(CALL_DEADLINE, xoscar.actor_ref(address=address, uid=uid))
        settings, report = self.mirror.settings, self._canary.report()
        call = self._tracker.join(
            namespace, member, self._key_bytes, settings, self._replica, PROTOCOL_VERSION, report
        )
        reply: JoinReply = await within(CALL_DEADLINE, call)
        self._canary.judged(namespace, report, reply.comparison)
        self.mirror.peers.expect(reply.epoch, reply.lease)
        self.publisher.last_sequence = max(self.publisher.last_sequence, reply.sequence)
        spawn(self._process.configure(reply.secret))
        await self.publisher.send_holdings(partial(self._call, namespace))
        if self.secret is not None:
            self.counts.reconnects += 1
        self.secret = reply.secret
        self.joined.set()
        self.events.tracker_session(None)
        return reply.lease

    async def _watch(self, namespace: str) -> None:
        mirror, timeout = self.mirror, self._watch_timeout
        while True:
            update: Update = await self._call(
                namespace, "watch", mirror.epoch, mirror.revision, timeout, wait=timeout
            )
            for _ in mirror.apply_in_pieces(update):
                await asyncio.sleep(PIECE_PAUSE)
            self._canary.mirror_changed()
            self._tell_members()

    def _tell_members(self) -> None:
        known = frozenset(self.mirror.peers)
        if known != self._known:
            self._known = known
            self._on_members(known)

    async def _send_heartbeats(self, namespace: str, lease: float) -> None:
        while True:
            pending = self.events.pending
            events = tuple(pending)[:MAX_REPORTED]
            if not await self._call(namespace, "heartbeat", self._current_stats(), events):
                raise NotMemberError(f"the tracker does not know {self._incarnation!r}; join again")
            for event in events:  # a full deque may have dropped the oldest meanwhile
                if pending and pending[0] is event:
                    pending.popleft()
            await asyncio.sleep(min(self._heartbeat, lease / _HEARTBEATS_PER_LEASE))

    async def _tell_serving(self, namespace: str) -> None:
        while True:
            self._process.ready_changed.clear()
            await self._call(namespace, "set_serving", self._process.ready)
            await self._process.ready_changed.wait()

    async def _compare(self, namespace: str) -> None:
        while True:
            await self._canary.changed.wait()
            report = self._canary.report()
            found: Comparison = await self._call(namespace, "compare", report)
            self._canary.judged(namespace, report, found)

    async def _call(self, namespace: str, method: str, *args: Any, wait: float = 0.0) -> Any:
        """Call a method of the tracker, which may take `wait` seconds longer than others."""
        call = getattr(self._tracker, method)(namespace, self._incarnation, *args)
        return await within(CALL_DEADLINE + wait, call)

    # Around the sessions

    def _current_stats(self) -> dict[str, object]:
        try:
            return self._stats()
        except Exception:
            self.counts.stats_failures += 1
            if self.counts.stats_failures == 1:
                logger.exception("stats failed: incarnation=%s", self._incarnation)
            return {}

    async def _end_session(self) -> None:
        self.joined.clear()
        if self._session is not None and not self._session.done():
            self._session.cancel()
            await asyncio.wait({self._session})

    async def _send_leave(self, namespace: str, moving: bool = False) -> None:
        if self._tracker is None:
            return
        try:
            call = self._tracker.leave(namespace, self._incarnation, moving)
            await within(LEAVE_DEADLINE, call)
        except Exception as error:
            self.counts.failures += 1
            logger.info(
                "no answer to leaving, the lease will expire: incarnation=%s error=%r",
                self._incarnation,
                error,
            )

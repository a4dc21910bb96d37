"""A replica's side of the tracker: keeps its mirror current and its holdings published.

Threading: a `TrackerClient` lives on one event loop, the replica's background loop, and all its
methods are called there. The `Mirror` it feeds may be read from anywhere (see `mirror`).

Life cycle: `run` serves one session after the other until it is cancelled or the replica leaves.

    locate → join → publish all holdings → { watch, heartbeat, publish }
       ↑______________ wait a little ← any failure ______________|

The tracker may be away, hang, lose its memory or come back held_by_peer: the mirror stays as it is
meanwhile, since the peers are still there, and the next session starts from the pool's holdings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import xoscar as xo

from xinference_xavier.protocol.tracker import (
    MAX_CLAIM_SECONDS,
    MAX_REPORTED,
    PROTOCOL_VERSION,
    JoinReply,
    Member,
    NotMemberError,
    Update,
    pack,
    tracker_uid,
)
from xinference_xavier.replica.live_peers import LivePeers
from xinference_xavier.replica.mirror import Mirror
from xinference_xavier.replica.publisher import Publisher, PublisherCounters
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.validate import check_count
from xinference_xavier.tiers.base import Claim

logger = logging.getLogger(__name__)

CALL_DEADLINE = 5.0
"""Seconds for a call of the tracker; a watch gets its waiting time on top."""
LOCATE_DEADLINE = 15.0
"""Seconds to find the tracker: the worker and the supervisor may have to be asked."""
LEAVE_DEADLINE = 1.0
CLAIM_DEADLINE = 0.5
CLAIM_LASTS = 4.0
"""Times as long as computing is expected to take."""
BACKOFF_FIRST, BACKOFF_LAST = 0.1, 2.0
"""Seconds before the next session."""
_BEATS_PER_LEASE = 5


@dataclass
class ClientCounters(PublisherCounters):
    """What happened since the start. `failures` are sessions that ended in one."""

    failures: int = 0
    reconnects: int = 0
    stats_failures: int = 0
    claim_failures: int = 0


class TrackerClient:
    """Membership of one replica.

    `address` is that of the replica's own actor. `locate` gives the address of the tracker's pool,
    or raises while there is none. `holdings` gives all keys the replica would publish now; `stats`
    its figures, JSON-able. `on_members` is told the peers to be taken for alive whenever they
    change. `on_joined` is given the model's secret at every join, before peers learn the holdings.
    `on_outage` is told what lost the tracker, and None when it is regained. `events` is what the
    owner wants the tracker to know; what was delivered is taken out. `replica` is the name that the
    replica keeps over its incarnations.
    `heartbeat`, at most a fifth of the tracker's lease, and `watch_timeout` are in seconds.

    `secret` is the model's, None before the first join, another one after the tracker was lost.
    `namespace` is the one to be in. `last_sequence` is that of the last publication that was sent.
    `connected`: the replica is a member and its holdings are published.
    """

    def __init__(
        self,
        *,
        model_uid: str,
        incarnation: str,
        namespace: str,
        key_bytes: int,
        address: str,
        locate: Callable[[], Awaitable[str]],
        mirror: Mirror,
        holdings: Callable[[], Iterable[bytes]],
        stats: Callable[[], dict[str, object]],
        on_members: Callable[[frozenset[str]], None],
        on_joined: Callable[[bytes], None],
        on_outage: Callable[[BaseException | None], None] = lambda error: None,
        events: deque[dict[str, Any]] | None = None,
        replica: str = "",
        heartbeat: float = 2.0,
        watch_timeout: float = 10.0,
    ) -> None:
        self.mirror = mirror
        self.secret: bytes | None = None
        self.connected = False
        self.counters = ClientCounters()
        self._model_uid = model_uid
        self._member = Member(incarnation, address)
        self.namespace = namespace
        self._key_bytes = key_bytes
        self._locate = locate
        self._stats = stats
        self._heartbeat = heartbeat
        self._watch_timeout = watch_timeout
        self._publisher = Publisher(incarnation, holdings, self.counters)
        self._live_peers = LivePeers(on_members)
        self._on_joined = on_joined
        self._on_outage = on_outage
        self._events = deque() if events is None else events
        self._replica = replica
        self._joined = asyncio.Event()
        self._hurry = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._tracker: Any = None
        self._leaving = False
        self._outage_logged = False

    @property
    def last_sequence(self) -> int:
        return self._publisher.last_sequence

    # What the replica calls

    async def run(self) -> None:
        """Be a member until cancelled or `leave` is called."""
        loop = asyncio.get_running_loop()
        backoff = BACKOFF_FIRST
        while not self._leaving:
            started = loop.time()
            self._hurry.clear()
            self._session = asyncio.create_task(self._serve(self.namespace))
            try:
                await asyncio.wait({self._session})
            finally:
                await self._end_session()
            if loop.time() - started > BACKOFF_LAST:
                backoff = BACKOFF_FIRST
            await self._pause(backoff * random.uniform(0.5, 1.0))
            backoff = min(BACKOFF_LAST, 2 * backoff)

    def publish(self, keys: Iterable[bytes]) -> None:
        """Queue `keys` as held now."""
        self._publisher.enqueue(keys, True)

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Queue `keys` as held no more, for the next publication or `flush`."""
        self._publisher.enqueue(keys, False)

    def flush(self) -> None:
        """Publish what is queued."""
        self._publisher.flush()

    async def claim(self, claim: Claim) -> None:
        """Ask who computes it: we, also if nobody answers in time."""
        held_by_peer = 0
        try:
            if self.connected:
                seconds = min(CLAIM_LASTS * claim.seconds, MAX_CLAIM_SECONDS)
                held_by_peer = await within(
                    CLAIM_DEADLINE, self._call(self.namespace, "claim", pack(claim.keys), seconds)
                )
                check_count("held_by_peer", held_by_peer, 0, len(claim.keys))
        except Exception:
            self.counters.claim_failures += 1
            held_by_peer = 0
        finally:
            claim.held_by_peer = held_by_peer

    async def release(self, claim: Claim) -> None:
        """What was ours to compute is computed, or will not be."""
        try:
            if self.connected:
                await self._call(self.namespace, "release", pack(claim.keys))
        except Exception:  # it will end by itself
            self.counters.claim_failures += 1

    async def joined(self) -> None:
        """Wait until the replica is a member and its holdings are published."""
        await self._joined.wait()

    async def change_namespace(self, namespace: str) -> None:
        """Leave the namespace for another one; join it as soon as the tracker answers.

        On return nothing of the old namespace is left in the mirror or will come there. Wait for
        `joined` to know that the replica is a member of the new one.
        """
        old, self.namespace = self.namespace, namespace
        await self._end_session()
        self.mirror.clear()
        self._live_peers.clear()
        await self._say_goodbye(old, moving=True)
        self._hurry.set()

    async def leave(self) -> None:
        """Stop being a member, within a second; `run` returns."""
        self._leaving = True
        await self._end_session()
        self._hurry.set()
        await self._say_goodbye(self.namespace)

    # A session

    async def _serve(self, namespace: str) -> None:
        try:
            lease = await self._join(namespace)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(namespace))
                tasks.create_task(self._renew(namespace, lease))
                tasks.create_task(self._publisher.run(partial(self._call, namespace)))
        except Exception as error:
            self.counters.failures += 1
            if not self._outage_logged:
                self._outage_logged = True
                cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                logger.warning(
                    "replica %s: lost the tracker of %s, trying again until it is back: %r",
                    self._member.incarnation,
                    self._model_uid,
                    cause,
                )
                self._on_outage(cause)

    async def _join(self, namespace: str) -> float:
        """Returns the lease, in seconds."""
        address = await within(LOCATE_DEADLINE, self._locate())
        uid = tracker_uid(self._model_uid)
        self._tracker = await within(CALL_DEADLINE, xo.actor_ref(address=address, uid=uid))
        reply: JoinReply = await within(
            CALL_DEADLINE,
            self._tracker.join(
                namespace,
                self._member,
                self._key_bytes,
                self.mirror.settings,
                self._replica,
                PROTOCOL_VERSION,
            ),
        )
        self._live_peers.start(reply.epoch, reply.lease)
        self._publisher.last_sequence = max(self.last_sequence, reply.sequence)
        self._on_joined(reply.secret)
        await self._publisher.send_holdings(partial(self._call, namespace))
        if self.secret is not None:
            self.counters.reconnects += 1
        self.secret = reply.secret
        self.connected = True
        self._joined.set()
        if self._outage_logged:
            self._outage_logged = False
            logger.info(
                "replica %s: joined the tracker of %s", self._member.incarnation, self._model_uid
            )
            self._on_outage(None)
        return reply.lease

    async def _watch(self, namespace: str) -> None:
        mirror, timeout = self.mirror, self._watch_timeout
        while True:
            update: Update = await self._call(
                namespace, "watch", mirror.epoch, mirror.revision, timeout, waits=timeout
            )
            mirror.apply(update)
            self._live_peers.see(mirror.peers)

    async def _renew(self, namespace: str, lease: float) -> None:
        while True:
            events = tuple(self._events)[:MAX_REPORTED]
            known = await self._call(namespace, "heartbeat", self._figures(), events)
            if not known:
                raise NotMemberError(f"{self._member.incarnation!r} must join again")
            for event in events:  # the oldest may have had to go meanwhile
                if self._events and self._events[0] is event:
                    self._events.popleft()
            await asyncio.sleep(min(self._heartbeat, lease / _BEATS_PER_LEASE))

    async def _call(self, namespace: str, method: str, *arguments: Any, waits: float = 0.0) -> Any:
        """Of the tracker, for this replica; it may wait this long before it answers."""
        call = getattr(self._tracker, method)(namespace, self._member.incarnation, *arguments)
        return await within(CALL_DEADLINE + waits, call)

    # Around the sessions

    def _figures(self) -> dict[str, object]:
        try:
            return self._stats()
        except Exception:
            self.counters.stats_failures += 1
            if self.counters.stats_failures == 1:
                logger.exception("replica %s: no figures", self._member.incarnation)
            return {}

    async def _end_session(self) -> None:
        self.connected = False
        self._joined.clear()
        if self._session is not None and not self._session.done():
            self._session.cancel()
            await asyncio.wait({self._session})

    async def _say_goodbye(self, namespace: str, moving: bool = False) -> None:
        if self._tracker is None:
            return
        try:
            call = self._tracker.leave(namespace, self._member.incarnation, moving)
            await within(LEAVE_DEADLINE, call)
        except Exception as error:
            self.counters.failures += 1
            logger.info(
                "replica %s: could not leave, its lease will end: %r",
                self._member.incarnation,
                error,
            )

    async def _pause(self, seconds: float) -> None:
        # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

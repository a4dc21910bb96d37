"""One replica beside its engine: it joins the tracker, shares its pool and fetches from peers.

Threading: `Replica` owns a background thread with an event loop for all I/O: tracker client,
grants, fetches, checksums. The scheduler thread makes it, and calls `start`, `stop` and `tier`.

Life cycle: `start` returns when the replica listens. It joins the tracker and starts the transfer
process in the background, and the engine waits for neither. `stop` ends the thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotSharing
from xinference_xavier.limits import START_DEADLINE, TICK
from xinference_xavier.options import TRANSPORTS
from xinference_xavier.pool.window import Window
from xinference_xavier.protocol.load import MAX_NEAR, Drain, Load, RequestReport
from xinference_xavier.protocol.prefixes import Kept
from xinference_xavier.protocol.tracker import pack, replica_name
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest
from xinference_xavier.replica.canary import Canary, ProbeResult
from xinference_xavier.replica.donor import Checksums, Donor
from xinference_xavier.replica.fetcher import Fetcher
from xinference_xavier.replica.hot_chunks import HotChunks, RecentPrompts
from xinference_xavier.replica.inspect import Chunker, Explainer, self_check
from xinference_xavier.replica.kept_prefixes import (
    ComputedPrefix,
    KeptPrefixes,
    MarkedPrompt,
    Prompt,
)
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.neighbours import Neighbours
from xinference_xavier.replica.peer_tier import Background, PeerTier
from xinference_xavier.replica.reports import (
    EventReporter,
    Identity,
    LoadReporter,
    Publisher,
    SharingLog,
)
from xinference_xavier.replica.tracker_client import TrackerClient, TrackerLocation
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import LoopThread, Rollback, finishing
from xinference_xavier.runtime.net import listen, own_host
from xinference_xavier.stats import schema

logger = logging.getLogger(__name__)

_STOP_TIMEOUT = 3.0


@dataclass
class Engine:
    """What the replica asks of its engine, on the background thread."""

    chunker: Chunker
    cannot_compare: str
    """Why it computes no canaries; empty if it does."""
    stats: Callable[[], dict[str, Any]]  # JSON-able
    load: Callable[[], Load | None]  # None while it starts
    work_on_probes: Callable[[], list[ProbeResult]]
    """Goes on with what it computes for comparisons."""
    # It appends to these, and the replica takes from them:
    prompts: deque[RequestReport]
    answers: deque[RequestReport]
    computed: deque[ComputedPrefix]  # of named prefixes
    marked: deque[MarkedPrompt]  # to be kept
    finished: deque[Prompt]  # of requests that ended, here or at a neighbour


class ReplicaActor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The calls from other processes."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica
        self._explainer = Explainer(replica.engine.chunker, replica.incarnation, replica.tier)

    # -- by peers -----------------------------------------------------------------------------

    def grant(self, request: GrantRequest) -> Grant:
        """Grant rows to a consumer. Raises GrantRefusedError, LinkError."""
        return self._replica.donor.grant(request)

    def release(self, consumer: str, number: int) -> None:
        self._replica.donor.grants.release(consumer, number)

    def hottest(self) -> bytes:
        """The packed keys of its hot chunks, the hottest first."""
        return pack(self._replica.recent.hottest())

    async def take_over(self, donor: str, packed: bytes, seconds: float) -> int:
        return await self._replica.hot_chunks.take_over(donor, packed, seconds)

    def transfer_endpoint(self) -> Endpoint | None:
        return self._replica.process.endpoint

    # -- by the tracker -----------------------------------------------------------------------

    def keep(self, changes: Mapping[str, bool | None] | None) -> Kept:
        return self._replica.kept.keep(changes)

    def drain(self, stay: tuple[str, ...], seconds: float) -> Drain:
        """Hand over what only this replica holds to the peers that `stay`. Returns how far the
        drain is."""
        load, hot_chunks = self._replica.engine.load(), self._replica.hot_chunks
        hot_chunks.leave(stay, seconds)
        requests = 0 if load is None else load.requests
        return Drain(seconds, requests, hot_chunks.leaving, hot_chunks.handed_over)

    async def set_weights_version(self, version: str) -> bool:
        """Share again with replicas of the same version; False if there was no reset."""
        namespace = self._replica.namespace
        return await finishing(namespace.rejoin(version, namespace.announced))

    def flush(self) -> int:
        """Forget all READY chunks; returns how many. vLLM's prefix cache keeps what it has."""
        return self._replica.publisher.forget(lambda _: True)

    async def stats(self) -> dict[str, Any]:
        stats = await self._replica.process.stats()
        if ways := {*self._replica.neighbours.linked_to.values()}:
            links = [stats["transport"]] if stats.get("links") else []
            stats["transport"] = ", ".join(sorted(ways) + links)
        return {**self._replica.stats(), **stats}

    async def explain(self, packed: bytes) -> dict[str, Any]:
        """Locate the chunks of a packed question. Raises ExplainError."""
        return await self._explainer.explain(packed)

    async def self_check(self) -> dict[str, Any]:
        replica = self._replica
        return await self_check(
            replica.config,
            replica.peers,
            replica.process,
            replica.neighbours,
            replica.fingerprint_fields,
        )

    # -- by xinference's worker ---------------------------------------------------------------

    async def warm_join(self) -> None:
        """Return when the warm join has ended."""
        await self._replica.hot_chunks.joined.wait()


class Replica:
    """`tier` is how the engine's scheduler knows it; the window belongs to the engine, too."""

    def __init__(
        self,
        config: XavierConfig,
        *,
        engine: Engine,
        tier: PeerTier,
        namespace: str,
        key_bytes: int,
        window: Window,
        workers: int = 1,
        cache_rows: int = 0,
        fingerprint_fields: Mapping[str, str] | None = None,
        not_sharing: NotSharing | None = None,
    ) -> None:
        """The engine has so many `workers`. `cache_rows` would hold its KV cache.
        `fingerprint_fields` are for people; `not_sharing` is why the engine takes no part. Raises
        TransportError if the configured host cannot be used here."""
        pool, disk = tier.pool, tier.disk
        self.tier = tier
        self.index, self.peers = index, peers = tier.index, tier.peers
        self.config = config
        self.engine = engine
        self.incarnation = incarnation = peers.incarnation
        self._row_bytes = window.row_bytes
        self._cache_rows = cache_rows
        self.fingerprint_fields = fingerprint_fields or {}
        self._never_sharing = not_sharing or (
            NotSharing.CANNOT_COMPARE if engine.cannot_compare else None
        )
        self._host = own_host(config.host, config.tracker)
        self._thread = LoopThread("xavier-replica", self._begin)
        self.process = process = TransferProcess(
            window.own,
            incarnation=incarnation,
            host=self._host,
            port_range=config.port_range,
            transports=TRANSPORTS.get(config.transport, (config.transport,)),
        )
        self.namespace = SharedNamespace(namespace, index, disk)
        self.publisher = publisher = Publisher(incarnation, pool)
        name = replica_name(incarnation, config.replica)
        own = Identity(config.model_uid, incarnation, name)
        events = EventReporter(own)
        self.canary = Canary(
            peers, self.namespace, disk, publisher, events, cannot=engine.cannot_compare
        )
        # A grant outlives the fetch that asked for it.
        self.donor = Donor(
            pool,
            peers,
            disk,
            process,
            self.namespace,
            publisher,
            engine.finished,
            2 * config.fetch_timeout,
        )
        self.neighbours = Neighbours(
            window, peers, workers, enabled=config.transport in ("auto", "shared_memory")
        )
        fetcher = Fetcher(
            pool=pool,
            row_bytes=window.row_bytes,
            process=process,
            neighbours=self.neighbours,
            namespace=self.namespace,
            index=index,
            disk=disk,
            publisher=publisher,
            events=events,
            canary=self.canary,
        )
        self._fetched = fetcher.counts
        self.kept = KeptPrefixes(
            pool, config.pin_fraction, engine.computed, engine.marked, tier.is_near
        )
        self.recent = RecentPrompts(pool, engine.finished, self.kept, disk)
        self.hot_chunks = HotChunks(
            incarnation=incarnation,
            key_bytes=key_bytes,
            index=index,
            fetcher=fetcher,
            neighbours=self.neighbours,
            process=process,
            recent=self.recent,
        )
        self._client = TrackerClient(
            own,
            TrackerLocation(config),
            index=index,
            namespace=self.namespace,
            canary=self.canary,
            publisher=publisher,
            process=process,
            events=events,
            load_reporter=LoadReporter(
                self._load, engine.prompts, engine.answers, self.hot_chunks.joined
            ),
        )
        self._background = Background(
            self._thread.loop,
            self._client,
            process,
            fetcher,
            Checksums(window.own, pool, publisher),
            self.canary,
            self.namespace,
        )

    # -- called by the scheduler thread ------------------------------------------------------

    def start(self) -> None:
        """Start the background thread. Raises TransportError if no port can be listened on."""
        self._thread.start(START_DEADLINE)

    def stop(self) -> None:
        """Leave the tracker; end the thread and the transfer process."""
        self._thread.stop(_STOP_TIMEOUT)

    # -- the background loop -----------------------------------------------------------------

    async def _begin(self, scope: Rollback) -> list[asyncio.Task[None]]:
        """Start the tasks that run as long as the replica does."""
        server = await listen(self._host, self.config.port_range)
        scope.undo(server.stop)
        lending = await self.donor.lending.open(self.donor.grants.borrower_ended)
        scope.undo(lending.close)
        scope.undo(self._client.leave)
        address: str = server.external_address
        # Without xinference nothing holds requests back meanwhile.
        waits = self.config.replica is None and self._never_sharing is None
        uid = replica_uid(self.incarnation)
        await xoscar.create_actor(ReplicaActor, self, address=address, uid=uid)
        background = [
            asyncio.ensure_future(work)
            for work in (
                self.process.run(),
                self.neighbours.run(),
                self._client.run(address, self.stats),
                self._background.checksums.run(),
                self._housekeep(),
                self.hot_chunks.join(self.config.warm_join if waits else 0.0),
                self.donor.run(),
                self.tier.disk.run(self.publisher),
            )
        ]
        scope.undo(self._end, background)
        self.tier.open(self._background)
        return background

    async def _end(self, background: list[asyncio.Task[None]]) -> None:
        self.tier.close()
        self.tier.disk.close()
        for task in background:
            task.cancel()
        for result in await asyncio.gather(*background, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("sharing ended: incarnation=%s", self.incarnation, exc_info=result)

    async def _housekeep(self) -> None:
        sharing_log = SharingLog(self.incarnation)
        while True:
            await asyncio.sleep(TICK)
            self.publisher.withdraw_evicted()
            self.publisher.flush()
            self.recent.collect()
            self.kept.collect()
            self.tier.disk.keep(chain.from_iterable(self.kept.prompts()))
            for result in self.engine.work_on_probes():
                self.canary.take(result)
            sharing_log.update(self._not_sharing(), len(self.peers.members))

    def _not_sharing(self) -> NotSharing | None:
        """Why the replica cannot fetch from any peer; None if it can."""
        if self._never_sharing:
            return self._never_sharing
        if not self.peers.enabled:
            return NotSharing.SWITCHED_OFF
        if self._client.secret is None:
            return NotSharing.NOT_JOINED
        if not self.tier.sharing:
            return NotSharing.RESETTING
        if not self.process.ready:
            return NotSharing.NO_TRANSFER_PROCESS
        if not self.peers.members:
            return NotSharing.NO_PEERS if self.namespace.durable else NotSharing.ALONE
        if not self.peers.trusted:
            return NotSharing.NOT_COMPARED
        return None

    def _load(self) -> Load | None:
        load = self.engine.load()
        return load and load._replace(near=self.peers.near[:MAX_NEAR])

    def stats(self) -> dict[str, Any]:
        """`ReplicaStats` as JSON, without a call to another process."""
        row_bytes, counts, process = self._row_bytes, self._fetched, self.process
        received = {peer.name: peer.received for peer in [*self.peers.values()]}
        return asdict(
            schema.ReplicaStats(
                **self.engine.stats(),
                from_environment=[*self.config.from_environment],
                replaced_vllm=self.config.replaced_vllm,
                bytes_received=counts.rows * row_bytes,
                received_from={name: rows * row_bytes for name, rows in received.items() if rows},
                fetching=dict(counts.in_flight),
                fetches=counts.fetches,
                pool=schema.PoolStats(
                    *self.tier.pool.counts(), row_bytes, self._cache_rows, self.config.engines
                ),
                mapped_bytes=self.neighbours.mapped_bytes,
                grants=len(self.donor.grants),
                indexed=len(self.index),
                comparison=self.canary.stats,
                disk=self.tier.disk.report(),
                not_sharing=self._not_sharing(),
                refused_posts=self._background.refused,
                transfer_pid=process.pid,
                transfer_restarts=max(0, process.starts - 1),
                tracker_failures=self._client.counts.failed,
            )
        )

"""One replica beside its engine: it joins the tracker, shares its pool and fetches from peers.

Threading: `Replica` owns a background thread with an event loop for all I/O: tracker client,
grants, fetches, checksums. The scheduler thread makes it, and calls `start`, `stop` and `tier`.

Life cycle: `start` returns when the replica listens. It joins the tracker and starts the transfer
process in the background, and the engine waits for neither. `stop` ends the thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotSharing
from xinference_xavier.options import TRANSPORTS
from xinference_xavier.peers import DISK
from xinference_xavier.pool.pool import Row, flush, shared_keys
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.load import Drain, Load, RequestReport
from xinference_xavier.protocol.prefixes import Kept
from xinference_xavier.protocol.sketches import Difference
from xinference_xavier.protocol.tracker import replica_name
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest, HotChunks
from xinference_xavier.replica.canary import Audited, Canary, Computed, Lost, ProbeResult
from xinference_xavier.replica.donor import Checksums, Donor
from xinference_xavier.replica.fetcher import Fetcher
from xinference_xavier.replica.hot_chunks import (
    HandOver,
    Prompt,
    RecentPrompts,
    WarmJoin,
)
from xinference_xavier.replica.inspect import Chunker, Explainer, self_check
from xinference_xavier.replica.kept_prefixes import ComputedPrefix, KeptPrefixes, MarkedPrompt
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.peer_tier import Background, PeerTier
from xinference_xavier.replica.reports import (
    EventReporter,
    LoadReporter,
    Publisher,
    SharingLog,
)
from xinference_xavier.replica.tracker_client import TrackerClient, TrackerLocation
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import LoopThread, Rollback, finishing, spawn
from xinference_xavier.runtime.net import check_range, listen, own_host
from xinference_xavier.stats import schema

logger = logging.getLogger(__name__)

_LINKS_INTERVAL = 10.0  # seconds, as are the others
_HOUSEKEEPING_INTERVAL = 1.0
_START_TIMEOUT = 60.0
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
    # These return what came since their last call, as `work_on_probes` does:
    take_prompts: Callable[[], tuple[RequestReport, ...]]
    take_answers: Callable[[], tuple[RequestReport, ...]]
    take_computed: Callable[[], tuple[ComputedPrefix, ...]]  # of named prefixes
    take_marked: Callable[[], tuple[MarkedPrompt, ...]]  # to be kept
    take_finished: Callable[[], Sequence[Prompt]]  # of requests that ended


class ReplicaActor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The calls from other processes."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica
        self._explainer = replica.explainer()

    # -- by peers -----------------------------------------------------------------------------

    def grant(self, request: GrantRequest) -> Grant:
        """Raises GrantRefusedError, LinkError."""
        return self._replica.grant(request)

    def release(self, grant_id: int) -> None:
        self._replica.donor.grants.release(grant_id)

    def hottest(self, most: int) -> HotChunks:
        return self._replica.recent.hottest(most)

    async def take_over(self, donor: str, packed: bytes, seconds: float) -> int:
        return await self._replica.hand_over.take(donor, packed, seconds)

    def transfer_endpoint(self) -> Endpoint | None:
        return self._replica.process.endpoint

    # -- by the tracker -----------------------------------------------------------------------

    def keep(self, changes: Mapping[str, bool | None] | None) -> Kept:
        return self._replica.kept.keep(changes)

    def drain(self, stay: tuple[str, ...], seconds: float) -> Drain:
        return self._replica.drain(stay, seconds)

    async def set_weights_version(self, version: str) -> bool:
        return await self._replica.set_weights_version(version)

    def flush(self) -> int:
        return self._replica.flush()

    async def stats(self) -> dict[str, Any]:
        return await self._replica.full_stats()

    async def explain(self, packed: bytes) -> dict[str, Any]:
        """Raises ExplainError."""
        return await self._explainer.explain(packed)

    async def self_check(self) -> dict[str, Any]:
        return await self._replica.self_check()

    # -- by xinference's worker ---------------------------------------------------------------

    async def warm_join(self) -> None:
        """Returns when it has ended."""
        await self._replica.warm_join.ended.wait()


class Replica:
    """`tier` is how the engine's scheduler knows it; the region belongs to the engine, too."""

    def __init__(
        self,
        config: XavierConfig,
        *,
        engine: Engine,
        tier: PeerTier,
        incarnation: str,
        namespace: str,
        key_bytes: int,
        region: Region,
        cache_rows: int = 0,
        fingerprint_fields: Mapping[str, str] | None = None,
        not_sharing: NotSharing | None = None,
    ) -> None:
        """`incarnation` is the engine's id; `cache_rows` would hold its KV cache.
        `fingerprint_fields` are for people; `not_sharing` is why the engine takes no part. Raises
        TransportError if the configured host or ports cannot be used here."""
        if config.port_range is not None:
            check_range(*config.port_range)  # fail now, not when the transfer process starts
        self.tier = tier
        self.mirror = tier.mirror
        self._config = config
        self._engine = engine
        self._incarnation = incarnation
        self._region = region
        self._cache_rows = cache_rows
        self._pool = tier.pool
        self._disk = tier.disk
        self._fingerprint_fields = fingerprint_fields or {}
        self._never_sharing = not_sharing or (
            NotSharing.CANNOT_COMPARE if engine.cannot_compare else None
        )
        self._host = own_host(config.host, config.tracker)
        self._thread = LoopThread("xavier-replica", self._begin)
        self.process = TransferProcess(
            region,
            incarnation=incarnation,
            host=self._host,
            port_range=config.port_range,
            transports=TRANSPORTS.get(config.transport, (config.transport,)),
        )
        warm_join_ended = asyncio.Event()
        self._namespace = SharedNamespace(namespace, self._move)
        if not not_sharing:
            self._disk.move(self._namespace.lasting)
        self.canary = Canary(
            self.mirror, self._namespace, self._differs, cannot=engine.cannot_compare
        )
        self._client = TrackerClient(
            model_uid=config.model_uid,
            incarnation=incarnation,
            namespace=namespace,
            key_bytes=key_bytes,
            locate=TrackerLocation(config).find,
            mirror=self.mirror,
            canary=self.canary,
            publisher=Publisher(incarnation, partial(shared_keys, self._pool)),
            process=self.process,
            events=EventReporter(config, incarnation),
            load_reporter=LoadReporter(
                engine.load, engine.take_prompts, engine.take_answers, warm_join_ended
            ),
            stats=self.stats,
            on_members=self._members_changed,
            replica=replica_name(incarnation, config.replica),
        )
        self._fetcher = Fetcher(
            incarnation=incarnation,
            pool=self._pool,
            row_bytes=region.row_bytes,
            process=self.process,
            namespace=self._namespace,
            mirror=self.mirror,
            disk=self._disk,
            publisher=self._client.publisher,
            events=self._client.events,
        )
        # Without xinference nothing holds requests back meanwhile.
        waits = config.replica is None and self._never_sharing is None
        self.warm_join = WarmJoin(
            config.warm_join if waits else 0.0,
            incarnation=incarnation,
            key_bytes=key_bytes,
            pool=self._pool,
            mirror=self.mirror,
            fetcher=self._fetcher,
            process=self.process,
            ended=warm_join_ended,
        )
        # A grant outlives the fetch that asked for it.
        self.donor = Donor(self._pool, self.process, 2 * config.fetch_timeout)
        self.kept = KeptPrefixes(
            self._pool, config.pin_fraction, engine.take_computed, engine.take_marked
        )
        self.recent = RecentPrompts(self._pool, engine.take_finished, self.kept, self._disk)
        self.hand_over = HandOver(
            incarnation=incarnation,
            key_bytes=key_bytes,
            mirror=self.mirror,
            fetcher=self._fetcher,
            recent=self.recent,
        )
        self._background = Background(
            self._thread.loop,
            self._client,
            self.process,
            self._fetcher,
            Checksums(region, self._pool, self._offer),
            self.canary,
            self._namespace,
        )

    # -- called by the scheduler thread ------------------------------------------------------

    def start(self) -> None:
        """Raises TransportError if no port can be listened on."""
        self._thread.start(_START_TIMEOUT)

    def stop(self) -> None:
        """Leave the tracker; end the thread and the transfer process."""
        self._thread.stop(_STOP_TIMEOUT)

    # -- the background loop -----------------------------------------------------------------

    async def _begin(self, scope: Rollback) -> list[asyncio.Task[None]]:
        """Start the tasks that run as long as the replica does."""
        server = await listen(self._host, self._config.port_range)
        scope.undo(server.stop)
        scope.undo(self._client.leave)
        address: str = server.external_address
        uid = replica_uid(self._incarnation)
        await xoscar.create_actor(ReplicaActor, self, address=address, uid=uid)
        background = [
            asyncio.ensure_future(work)
            for work in (
                self.process.run(),
                self._client.run(address),
                self._background.checksums.run(),
                self._housekeep(),
                self.warm_join.run(),
                self._end_late_links(),
                self._disk.run(self._forget_foreign),
            )
        ]
        scope.undo(self._end, background)
        self.tier.open(self._background)
        return background

    async def _move(self, namespace: str) -> None:
        self._disk.move(self._namespace.lasting)
        await self._client.change_namespace(namespace)

    async def _end(self, background: list[asyncio.Task[None]]) -> None:
        self.tier.close()
        self._disk.close()
        for task in background:
            task.cancel()
        for result in await asyncio.gather(*background, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("sharing ended: incarnation=%s", self._incarnation, exc_info=result)

    def _members_changed(self, members: frozenset[str]) -> None:
        spawn(self._end_links())

    async def _end_links(self) -> None:
        """End what connects us with replicas that are no peers any more."""
        peers = frozenset(self.mirror.peers)
        # Links first: while a link is open, granted rows may be in flight.
        await self.process.close_links_except(peers)
        self.donor.grants.release_except(peers)

    async def _end_late_links(self) -> None:
        """A replica may open one after its lease has expired, before it knows."""
        while True:
            await asyncio.sleep(_LINKS_INTERVAL)
            await self._end_links()

    def _offer(self, keys: list[bytes]) -> None:
        """The engine computed these chunks, and they may be shared from now on."""
        self._client.publisher.enqueue(keys, held=True)

    def _differs(self, peer: str, found: Difference, parts: bool) -> None:
        """What we have fetched may be wrong, too: others may have got it from the peer."""
        if parts:
            self._client.events.differs(peer, found)
        self._forget_foreign()

    async def _housekeep(self) -> None:
        sharing_log = SharingLog(self._incarnation)
        while True:
            await asyncio.sleep(_HOUSEKEEPING_INTERVAL)
            self._client.publisher.withdraw_evicted()
            self._client.publisher.flush()
            self.donor.grants.expire(time.monotonic())
            self.recent.collect()
            self.kept.collect()
            self._disk.keep(chain.from_iterable(self.kept.prompts()))
            for result in self._engine.work_on_probes():
                self._take_result(result)
            sharing_log.update(self._not_sharing(), len(self.mirror.peers.members))

    def _take_result(self, result: ProbeResult) -> None:
        stats = self.canary.stats
        match result:
            case Lost():
                stats.lost_probes += 1
            case Computed(name, sketch):
                self.canary.computed(name, sketch)
                self._disk.probed(name.encode(), sketch)
            case Audited(donor, found):
                stats.audits += 1
                if found is not None:
                    stats.failed_audits += 1
                    self._audit_failed(donor, found)

    def _audit_failed(self, donor: str | None, found: Difference) -> None:
        """Fetch no more from there, and drop what was fetched from anywhere; all rows if they were
        our own."""
        self._client.events.audit_failed(donor, found)
        if donor is None:
            self.flush()
        elif donor == DISK:
            self._disk.distrust(found)
            self._forget_foreign()
        else:
            self.canary.distrust(donor, found)  # calls `_differs`

    def _not_sharing(self) -> NotSharing | None:
        """Why the replica cannot fetch from any peer; None if it can."""
        if self._never_sharing:
            return self._never_sharing
        if not self.mirror.enabled:
            return NotSharing.SWITCHED_OFF
        if self._client.secret is None:
            return NotSharing.NOT_JOINED
        if not self.tier.sharing:
            return NotSharing.RESETTING
        if not self.process.ready:
            return NotSharing.NO_TRANSFER_PROCESS
        if not self.mirror.peers.members:
            return NotSharing.NO_PEERS if self._namespace.lasting else NotSharing.ALONE
        if not self.mirror.trusted:
            return NotSharing.NOT_COMPARED
        return None

    # -- asked by peers and the tracker -------------------------------------------------------

    def grant(self, request: GrantRequest) -> Grant:
        """Raises GrantRefusedError, LinkError."""
        shares = self.tier.sharing and self.mirror.enabled
        grant = self.donor.grant(
            request,
            namespace=self._namespace.current if shares else None,
            sequence=self._client.publisher.last_sequence,
            trusts=self.mirror.may_fetch,
        )
        self._disk.used(request.keys[: len(grant.checksums)])
        return grant

    async def set_weights_version(self, version: str) -> bool:
        """Share again with replicas of the same version; False if there was no reset."""
        return await finishing(self._namespace.rejoin(version, self._namespace.announced))

    def flush(self) -> int:
        """Forget all READY chunks; returns how many. vLLM's prefix cache keeps what it has."""
        return self._forget(lambda _: True)

    def _forget_foreign(self) -> None:
        """Keep only what the engine has computed."""
        self._forget(lambda row: row.origin is not None)

    def _forget(self, of: Callable[[Row], bool]) -> int:
        keys = flush(self._pool, of)
        self._client.publisher.enqueue(keys, held=False)
        self._client.publisher.flush()
        return len(keys)

    def drain(self, stay: tuple[str, ...], seconds: float) -> Drain:
        """How far the replica is, which hands over what only it holds to the peers that `stay`."""
        load, hand_over = self._engine.load(), self.hand_over
        hand_over.begin(stay, seconds)
        requests = 0 if load is None else load.requests
        return Drain(seconds, requests, hand_over.under_way, hand_over.chunks)

    def explainer(self) -> Explainer:
        return Explainer(self._engine.chunker, self._incarnation, self.tier)

    async def self_check(self) -> dict[str, Any]:
        return await self_check(self._config, self.mirror, self.process, self._fingerprint_fields)

    def stats(self) -> dict[str, Any]:
        """`ReplicaStats` as JSON, without a call to another process."""
        row_bytes, counts, process = self._region.row_bytes, self._fetcher.counts, self.process
        received = {peer.name: peer.received for peer in [*self.mirror.peers.values()]}
        return asdict(
            schema.ReplicaStats(
                **self._engine.stats(),
                from_environment=[*self._config.from_environment],
                replaced_vllm=self._config.replaced_vllm,
                bytes_received=counts.rows * row_bytes,
                received_from={name: rows * row_bytes for name, rows in received.items() if rows},
                fetching=dict(counts.in_flight),
                fetches=counts.fetches,
                pool=schema.PoolStats(
                    *self._pool.counts(), row_bytes, self._cache_rows, self._config.engines
                ),
                grants=len(self.donor.grants),
                mirrored=len(self.mirror),
                comparison=self.canary.stats,
                disk=self._disk.report(),
                not_sharing=self._not_sharing(),
                refused_posts=self._background.refused,
                transfer_pid=process.pid,
                transfer_restarts=max(0, process.starts - 1),
                tracker_failures=self._client.counts.failed,
            )
        )

    async def full_stats(self) -> dict[str, Any]:
        """Like `stats`, with the transfer process's figures."""
        return {**self.stats(), **await self.process.stats()}

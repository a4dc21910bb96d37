"""One replica beside its engine: joined to the tracker, sharing its pool, fetching from peers.

Threading: `Replica` owns a background thread with an event loop on which everything that talks to
others happens: tracker client, grants, fetches, checksums' bookkeeping. The scheduler thread calls
`start`, `stop` and the methods of `tier`.

Life cycle: `start` returns when the replica listens; joining and the transfer process follow in the
background, and the engine serves without waiting for either. `stop` ends the thread; if it is never
called (SIGKILL), leases and closed sockets tell the others.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import (
    ALONE,
    NO_PEERS,
    NO_TRANSFER_PROCESS,
    NOT_JOINED,
    RESETTING,
    SWITCHED_OFF,
    ExplainError,
)
from xinference_xavier.options import TRANSPORTS
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.startup_errors import replica_name
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest
from xinference_xavier.replica.actor import ReplicaActor
from xinference_xavier.replica.checksums import Checksums
from xinference_xavier.replica.donor import Donor
from xinference_xavier.replica.event_reporter import EventReporter
from xinference_xavier.replica.explain import Chunker, explanation
from xinference_xavier.replica.fetcher import Fetcher
from xinference_xavier.replica.mirror import Mirror
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.self_check import SelfCheck
from xinference_xavier.replica.sharing_log import SharingLog
from xinference_xavier.replica.stats import replica_stats
from xinference_xavier.replica.tracker_client import TrackerClient
from xinference_xavier.replica.tracker_location import TrackerLocation
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid, split_address
from xinference_xavier.runtime.net import check_range, listen, local_host_towards
from xinference_xavier.runtime.rollback import Rollback

logger = logging.getLogger(__name__)

_LOOK_INTERVAL = 1.0
_LINKS_INTERVAL = 10.0
_STOP_TIMEOUT = 3.0


class Replica:
    """`pool` and `region` are this engine's; `incarnation` is its engine id."""

    def __init__(
        self,
        config: XavierConfig,
        *,
        incarnation: str,
        namespace: str,
        key_bytes: int,
        region: Region,
        pool: Pool,
        engine_stats: Callable[[], dict[str, Any]],
        fingerprint_fields: Mapping[str, str] | None = None,
    ) -> None:
        """`fingerprint_fields` are the namespace's, for people."""
        self._config = config
        self._fingerprint_fields = fingerprint_fields or {}
        self._address = ""  # of our actor, when it listens
        self._incarnation = incarnation
        self._namespace = SharedNamespace(
            namespace, lambda namespace: self._client.change_namespace(namespace)
        )
        self._key_bytes = key_bytes
        self._region = region
        self._pool = pool
        self._engine_stats = engine_stats
        self._events = EventReporter(config, incarnation)
        self.mirror = Mirror(incarnation)
        self.tier = PeerTier(pool, self.mirror, self._namespace)
        self.chunker: Chunker | None = None  # set by an engine that can explain
        self._explaining = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="xavier-replica", daemon=True)
        self._known_members: frozenset[str] = frozenset()
        self._up = threading.Event()
        self._error: Exception | None = None
        self._main_task: asyncio.Task[None]
        self._client: TrackerClient
        self._process: TransferProcess
        self._fetcher: Fetcher
        self._donor: Donor
        self._checksums: Checksums

    # -- called by the scheduler thread ------------------------------------------------------

    def start(self, timeout: float = 60.0) -> None:
        """Listen and begin to join.

        Raises:
            TransportError: the configured host or ports cannot be used here.
        """
        self._thread.start()
        if not self._up.wait(timeout):
            raise TimeoutError(f"the replica's background loop did not start within {timeout:g} s")
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Leave the tracker and end the thread and the transfer process."""
        if self.tier.post(lambda: self._main_task.cancel()):
            self._thread.join(_STOP_TIMEOUT)

    # -- the background loop -----------------------------------------------------------------

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):  # `stop`
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()  # type: ignore[assignment]  # we are in one
        async with Rollback() as scope:  # never committed: it ends with the replica
            try:
                background = await self._begin(scope)
            except Exception as error:  # handed to `start`, which raises it
                self._error = error
                return
            finally:
                self._up.set()
            await asyncio.wait(background, return_when=asyncio.FIRST_EXCEPTION)

    async def _begin(self, scope: Rollback) -> list[asyncio.Task[None]]:
        """Everything that runs as long as the replica does."""
        config = self._config
        if config.port_range is not None:
            check_range(*config.port_range)  # not only when the transfer process starts
        host = config.host or local_host_towards(config.tracker_address)
        server = await listen(host, config.port_range)
        scope.undo(server.stop)
        self._address = server.external_address
        await xoscar.create_actor(
            ReplicaActor, self, address=server.external_address, uid=replica_uid(self._incarnation)
        )
        self._process = TransferProcess(
            self._region,
            incarnation=self._incarnation,
            host=host,
            port_range=config.port_range,
            transports=TRANSPORTS.get(config.transport, (config.transport,)),
        )
        self._client = TrackerClient(
            model_uid=config.model_uid,
            incarnation=self._incarnation,
            namespace=self._namespace.current,
            key_bytes=self._key_bytes,
            address=server.external_address,
            locate=TrackerLocation(config).find,
            mirror=self.mirror,
            holdings=self._pool.shared_keys,
            stats=self.stats,
            on_members=self._members_changed,
            on_joined=self._joined,
            on_outage=self._events.outage,
            events=self._events.pending,
            replica=replica_name(),
        )
        scope.undo(self._client.leave)
        self._fetcher = Fetcher(
            incarnation=self._incarnation,
            pool=self._pool,
            row_bytes=self._region.row_bytes,
            process=self._process,
            namespace=lambda: self._namespace.current,
            address_of=self.mirror.address,
            record_stale=self.mirror.record_stale,
            arrived=lambda rows: self._client.publish([row.key for row in rows]),
            rolled_back=self._events.rolled_back,
        )
        # A grant lives twice as long as the fetch that asked for it may take.
        self._donor = Donor(self._pool, self._process, 2 * config.fetch_timeout)
        self._checksums = Checksums(self._region, self._pool, self._client.publish)
        background = [
            asyncio.ensure_future(work)
            for work in (
                self._process.run(),
                self._client.run(),
                self._checksums.run(),
                self._look_around(),
                self._close_late_links(),
            )
        ]
        scope.undo(self._end, background)
        self.tier.open(self._client, self._process, self._fetcher, self._checksums)
        return background

    async def _end(self, background: list[asyncio.Task[None]]) -> None:
        self.tier.close()
        for task in background:
            task.cancel()
        for result in await asyncio.gather(*background, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("replica %s stopped sharing", self._incarnation, exc_info=result)

    def _joined(self, secret: bytes) -> None:
        self.tier.spawn(self._process.configure(secret))

    def _members_changed(self, members: frozenset[str]) -> None:
        gone = self._known_members - members
        self._known_members = members
        for incarnation in gone:
            self._fetcher.forget(incarnation)
        if gone:
            self.tier.spawn(self._part_with(gone))

    async def _part_with(self, gone: frozenset[str]) -> None:
        # The links first: as long as they are open, granted rows may be on their way.
        await self._process.close_links_except(self._known_members)
        for incarnation in gone:
            self._donor.grants.forget(incarnation)

    async def _close_late_links(self) -> None:
        """Those that a replica opened before it knew that it was taken for gone."""
        while True:
            await asyncio.sleep(_LINKS_INTERVAL)
            await self._process.close_links_except(self._known_members)

    async def _look_around(self) -> None:
        sharing_log = SharingLog(self._incarnation)
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            self.tier.withdraw_evicted()
            self._client.flush()
            self._donor.grants.expire(time.monotonic())
            sharing_log.see(self._not_sharing(), len(self.mirror.peers))

    def _not_sharing(self) -> str | None:
        """Why nothing can be fetched from anybody; None if it can."""
        if not self.mirror.enabled:
            return SWITCHED_OFF
        if self._client.secret is None:
            return NOT_JOINED
        if not self.tier.sharing:
            return RESETTING
        if not self._process.ready:
            return NO_TRANSFER_PROCESS
        if not self.mirror.peers:
            return ALONE if self._namespace.is_ours_alone else NO_PEERS
        return None

    # -- asked by peers and the tracker -------------------------------------------------------

    def grant(self, request: GrantRequest) -> Grant:
        """Raises GrantRefusedError, LinkError."""
        shares = self.tier.sharing and self.mirror.enabled
        return self._donor.grant(
            request,
            namespace=self._namespace.current if shares else None,
            sequence=self._client.last_sequence,
        )

    def release(self, grant_id: int) -> None:
        self._donor.grants.release(grant_id)

    async def set_weights_version(self, version: str) -> bool:
        """Share again with those of the same version; False if there was no reset."""
        return await self._namespace.rejoin(version)

    def flush(self) -> int:
        """Forget all chunks that are at rest; returns how many. What vLLM's own prefix cache holds
        is not touched, and what is being written comes to stay."""
        keys = self._pool.flush()
        self._client.withdraw(keys)
        self._client.flush()
        return len(keys)

    async def explain(self, question: dict[str, Any]) -> dict[str, Any]:
        """Where a prompt's chunks are, and what each replica of our namespace would reuse.

        Raises:
            ExplainError: there is no tokenizer, or it does not take this.
        """
        if self.chunker is None:
            raise ExplainError(f"replica {self._incarnation} does not know its tokenizer")
        async with self._explaining:
            chunked = await asyncio.to_thread(self.chunker, question)
        return explanation(
            chunked,
            incarnation=self._incarnation,
            pool=self._pool,
            mirror=self.mirror,
            min_fetch_tokens=self._config.least_fetch_tokens,
        )

    @property
    def transfer_endpoint(self) -> Endpoint | None:
        return self._process.endpoint

    async def self_check(self) -> dict[str, Any]:
        host, _ = split_address(self._address)
        return await SelfCheck(
            self._config, host, self.mirror, self._process, self._fingerprint_fields
        ).run()

    def stats(self) -> dict[str, Any]:
        """`ReplicaStats` as JSON, without a call to another process."""
        return asdict(
            replica_stats(
                self._engine_stats(),
                self._fetcher.counts,
                row_bytes=self._region.row_bytes,
                pool=self._pool,
                donor=self._donor,
                mirror=self.mirror,
                process=self._process,
                hooks=self._events.hooks,
                not_sharing=self._not_sharing(),
                refused_posts=self.tier.refused,
            )
        )

    async def full_stats(self) -> dict[str, Any]:
        """The same with what the transfer process knows. `bytes_received` stays the replica's
        count: a transfer process that was restarted has begun at zero."""
        stats = self.stats()
        return {**stats, **await self._process.stats(), "bytes_received": stats["bytes_received"]}

"""One replica beside its engine: joined to the tracker, sharing its pool, fetching from peers.

Threading: `Replica` owns a background thread with an event loop on which everything that talks to
others happens: tracker client, grants, fetches, checksums' bookkeeping. The scheduler thread calls
the methods marked so below; each of them returns at once.

Life cycle: `start` returns when the replica listens; joining and the transfer process follow in the
background, and the engine serves without waiting for either. `stop` ends the thread; if it is never
called (SIGKILL), leases and closed sockets tell the others.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import xoscar

from xinference_xavier.addresses import replica_uid, split_address
from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import ExplainError
from xinference_xavier.examination import Patient, examine
from xinference_xavier.explanation import Chunker, explanation
from xinference_xavier.hooks import (
    Event,
    FetchRolledBack,
    TrackerLost,
    TrackerRegained,
    hooks_of,
)
from xinference_xavier.network import listen, local_host_towards
from xinference_xavier.pool.checksums import Checksums
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.replica_actor import ReplicaActor
from xinference_xavier.rollback import Rollback
from xinference_xavier.shared_namespace import SharedNamespace
from xinference_xavier.sharing_log import (
    ALONE,
    NO_PEERS,
    NO_TRANSFER_PROCESS,
    NOT_JOINED,
    RESETTING,
    SWITCHED_OFF,
    SharingLog,
)
from xinference_xavier.tracker.claims import Claim
from xinference_xavier.tracker.client import TrackerClient
from xinference_xavier.tracker.events import MAX_REPORTED, event_dict
from xinference_xavier.tracker.failure import replica_name
from xinference_xavier.tracker.location import TrackerLocation
from xinference_xavier.tracker.mirror import Mirror
from xinference_xavier.tracker.publisher import MAX_QUEUED
from xinference_xavier.transfer.donor import Donor
from xinference_xavier.transfer.fetch import Fetch, Fetcher
from xinference_xavier.transfer.free_ports import check_range
from xinference_xavier.transfer.messages import Contact, Grant, GrantRequest
from xinference_xavier.transfer.process import TransferProcess

logger = logging.getLogger(__name__)

_GLOO = "xinference_xavier.transfer.gloo:GlooTransport"
_SHARED_MEMORY = "xinference_xavier.transfer.shared_memory:SharedMemoryTransport"
TRANSPORTS = {
    "auto": (_SHARED_MEMORY, _GLOO),
    "gloo": (_GLOO,),
    "shared_memory": (_SHARED_MEMORY,),
}
"""Best first."""
MAX_BACKLOG = 10_000
"""Things that the scheduler thread may have left to the background loop at a time."""
_LOOK_INTERVAL = 1.0
_LINKS_INTERVAL = 10.0
_MAX_DONORS = 100  # that figures name
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
        ingredients: Mapping[str, str] | None = None,
    ) -> None:
        """`ingredients` are the namespace's, for people."""
        self._config = config
        self._ingredients = ingredients or {}
        self._address = ""  # of our actor, when it listens
        self._incarnation = incarnation
        self._namespace = SharedNamespace(
            namespace, lambda namespace: self._client.change_namespace(namespace)
        )
        self._key_bytes = key_bytes
        self._region = region
        self._pool = pool
        self._engine_stats = engine_stats
        self._hooks = hooks_of(config.hooks)
        self._untold: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTED)  # events, to the tracker
        self.mirror = Mirror(incarnation)
        self.chunker: Chunker | None = None  # set by an engine that can explain
        self._explaining = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="xavier-replica", daemon=True)
        self._known_members: frozenset[str] = frozenset()
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = threading.Event()
        self._running = False
        # Evicted, not withdrawn yet. Those beyond are of a loop that stands still: its membership
        # ends, and with it what the tracker knows.
        self._gone: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._posted = 0  # by the scheduler thread; so many of them
        self._handled = 0  # by the background loop
        self._refused_posts = 0
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop
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
        if self._post(lambda: self._main_task.cancel()):
            self._thread.join(_STOP_TIMEOUT)

    @property
    def sharing(self) -> bool:
        """Whether there are peers to share with: not while a reset is on its way."""
        return self._running and self._namespace.is_settled

    @property
    def can_fetch(self) -> bool:
        """Whether the mirror may be asked for donors."""
        return self.sharing and self._process.ready

    def stored(self, rows: Sequence[Row]) -> None:
        """These rows are READY: sum them up and offer them."""
        self._post_if_room(self._checksums.add, rows)

    def evicted(self, keys: Sequence[bytes]) -> None:
        """These chunks are gone.

        That wakes nobody: it is told with what is stored or fetched next, or within a second. Who
        asks for one meanwhile is granted what comes before it.
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
        if not self._post_if_room(lambda: self._spawn(self._client.claim(claim))):
            claim.elsewhere = 0
        return claim

    def release_claim(self, claim: Claim) -> None:
        """The request that was to compute this has ended."""
        self._post_if_room(lambda: self._spawn(self._client.release(claim)))

    def reset(self) -> None:
        """Everything computed so far is void, here and, coming from us, anywhere else.

        From now on we share only in a namespace of our own, until somebody says which version our
        weights are.
        """
        self._namespace.announce_reset()
        self._pool.reset()
        self._post(lambda: self._spawn(self._namespace.part()))

    def _post(self, action: Callable[..., object], *args: object) -> bool:
        """Have the background loop do something soon; False if it has ended."""
        if not self._running:
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
            self._refused_posts += 1
            return False
        self._posted += 1
        return self._post(self._handle, action, args)

    def _handle(self, action: Callable[..., object], args: tuple[object, ...]) -> None:
        self._handled += 1
        self._withdraw_gone()  # first: the action may bring one of them back
        action(*args)

    def _withdraw_gone(self) -> None:
        gone = [self._gone.popleft() for _ in range(len(self._gone))]  # more may come meanwhile
        if gone:
            self._client.withdraw(gone)

    # -- the background loop -----------------------------------------------------------------

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):  # `stop`
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
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
            on_outage=self._tell_outage,
            events=self._untold,
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
            note_stale=self.mirror.note_stale,
            arrived=lambda rows: self._client.publish([row.key for row in rows]),
            rolled_back=self._tell_rolled_back,
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
        self._running = True
        return background

    async def _end(self, background: list[asyncio.Task[None]]) -> None:
        self._running = False
        for task in background:
            task.cancel()
        for result in await asyncio.gather(*background, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("replica %s stopped sharing", self._incarnation, exc_info=result)

    def _joined(self, secret: bytes) -> None:
        self._spawn(self._process.configure(secret))

    def _members_changed(self, members: frozenset[str]) -> None:
        gone = self._known_members - members
        self._known_members = members
        for incarnation in gone:
            self._fetcher.forget(incarnation)
        if gone:
            self._spawn(self._part_with(gone))

    async def _part_with(self, gone: frozenset[str]) -> None:
        # The links first: as long as they are open, granted rows may be on their way.
        await self._process.keep(self._known_members)
        for incarnation in gone:
            self._donor.grants.forget(incarnation)

    async def _close_late_links(self) -> None:
        """Those that a replica opened before it knew that it was taken for gone."""
        while True:
            await asyncio.sleep(_LINKS_INTERVAL)
            await self._process.keep(self._known_members)

    def _tell(self, event: Event) -> None:
        self._hooks.tell(event)
        self._untold.append(event_dict(event))

    def _tell_outage(self, error: BaseException | None) -> None:
        uid, incarnation = self._config.model_uid, self._incarnation
        if error is None:
            self._tell(TrackerRegained(model_uid=uid, incarnation=incarnation))
        else:
            reason = repr(error)
            self._tell(TrackerLost(model_uid=uid, incarnation=incarnation, reason=reason))

    def _tell_rolled_back(self, fetch: Fetch, reason: str) -> None:
        self._tell(
            FetchRolledBack(
                model_uid=self._config.model_uid,
                incarnation=self._incarnation,
                donor=fetch.donor,
                reason=reason,
                rows=len(fetch.rows),
                committed=len(fetch.committed),
            )
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_around(self) -> None:
        sharing_log = SharingLog(self._incarnation)
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            self._withdraw_gone()
            self._client.flush()
            self._donor.grants.expire(time.monotonic())
            sharing_log.see(self._not_sharing(), len(self.mirror.peers))

    def _not_sharing(self) -> str | None:
        """Why nothing can be fetched from anybody; None if it can."""
        if not self.mirror.enabled:
            return SWITCHED_OFF
        if self._client.secret is None:
            return NOT_JOINED
        if not self.sharing:
            return RESETTING
        if not self._process.ready:
            return NO_TRANSFER_PROCESS
        if not self.mirror.peers:
            return ALONE if self._namespace.is_ours_alone else NO_PEERS
        return None

    # -- asked by peers and the tracker -------------------------------------------------------

    def grant(self, request: GrantRequest) -> Grant:
        """Raises GrantRefusedError, LinkError."""
        shares = self.sharing and self.mirror.enabled
        return self._donor.grant(
            request,
            namespace=self._namespace.current if shares else None,
            sequence=self._client.last_sequence,
        )

    def release(self, grant_id: int) -> None:
        self._donor.grants.release(grant_id)

    async def set_weights_version(self, version: str) -> bool:
        """Share again with those of the same version; False if there was no reset."""
        return await self._namespace.join(version)

    def drop(self) -> int:
        """Forget all chunks that are at rest; returns how many. What vLLM's own prefix cache holds
        is not touched, and what is being written comes to stay."""
        keys = self._pool.drop()
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
    def transfer_contact(self) -> Contact | None:
        return self._process.contact

    async def examine(self) -> dict[str, Any]:
        host, _ = split_address(self._address)
        patient = Patient(self._config, host, self.mirror, self._process, self._ingredients)
        return await examine(patient)

    def stats(self) -> dict[str, Any]:
        """Figures of this replica since its start, without asking anybody."""
        counts = self._fetcher.counts
        row_bytes = self._region.row_bytes
        return self._engine_stats() | {
            "bytes_received": counts.rows * row_bytes,
            "received_from": {
                donor: rows * row_bytes for donor, rows in counts.received.most_common(_MAX_DONORS)
            },
            "fetching": dict(counts.in_flight.most_common(_MAX_DONORS)),
            "fetches": {
                "started": counts.started,
                "committed": counts.committed,
                "rolled_back": dict(counts.rolled_back),
                "by_transport": {
                    name: figures.to_dict() for name, figures in counts.by_transport.items()
                },
            },
            "not_sharing": self._not_sharing(),
            "pool": self._pool.counts()._asdict() | {"row_bytes": row_bytes},
            "grants": {"live": len(self._donor.grants), "refused": self._donor.refused},
            "mirror": {"keys": len(self.mirror), "dropped": self.mirror.dropped},
            "refused_posts": self._refused_posts,
            "transfer_restarts": max(0, self._process.starts - 1),
            "transfer_pid": self._process.pid,
        }

    async def full_stats(self) -> dict[str, Any]:
        return self.stats() | await self._process.stats()

"""Real trackers and replicas without vLLM, in processes of their own. A replica has a real pool,
region, index and transfer process. The content of a row follows from its key, so that a single
wrong byte is seen.
"""

import asyncio
import hashlib
import itertools
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xoscar

from examples.processes import until
from tests.harness.comparisons import all_holders, sketch, usable_holders
from tests.harness.remote import PATIENCE, Remote, obey, serve_actors
from xinference_xavier.config import XavierConfig
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.pool import region as region_module
from xinference_xavier.pool.pool import Pool, PoolCounts, Row, shared_keys
from xinference_xavier.pool.region import Region, serve_region
from xinference_xavier.pool.window import Window
from xinference_xavier.protocol.load import Load
from xinference_xavier.protocol.sketches import Difference
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.replica import neighbours as neighbours_module
from xinference_xavier.replica.canary import Audited, Computed, ProbeResult
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.fetcher import Fetch, FetchState
from xinference_xavier.replica.inspect import Chunked
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.replica import Engine, Replica
from xinference_xavier.tracker.actor import BlockTracker

ROW_BYTES = 64 << 10
KEY_BYTES = 36
CHUNK_TOKENS = 128
MODEL = "model"
_NUMBERS = itertools.count()
DEADLINE = PATIENCE  # of the tests' own waits


def make_key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() + b"\0\0\0\0"


def content(key: bytes, size: int = ROW_BYTES) -> npt.NDArray[np.uint8]:
    """The bytes that the row of `key` must hold."""
    seed = int.from_bytes(key[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def fresh_numbers(count: int) -> list[int]:
    """Numbers of keys that no test has used yet."""
    return [next(_NUMBERS) for _ in range(count)]


def fresh_keys(count: int) -> list[bytes]:
    """Keys that no test has used yet."""
    return [make_key(number) for number in fresh_numbers(count)]


def wait_until(condition: Callable[[], bool], what: str, *, interval: float = 0.005) -> None:
    """Poll a condition in another process, which cannot notify the test."""
    assert until(condition, DEADLINE, interval), f"never came true: {what}"


def chunk_numbers(question: dict[str, Any]) -> Chunked:
    """A prompt of these replicas is a list of numbers; each is one chunk, with the key `make_key`
    gives it."""
    words = question["prompt"].split()
    keys: list[tuple[bytes, ...]] = [(make_key(int(number)),) for number in words]
    return Chunked(len(words) * CHUNK_TOKENS, 4096, CHUNK_TOKENS, keys)


class Outcome(NamedTuple):
    """The outcome of a fetch."""

    state: str
    reason: str | None
    committed: int  # rows
    seconds: float  # until it was decided


_T = TypeVar("_T")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))


class StillEngine(Engine):
    """An engine that computes nothing. A test sets what it counts, reports and has done."""

    def __init__(self) -> None:
        self.counted: dict[str, Any] = {}
        self.reported: Load | None = None
        self.results: list[ProbeResult] = []
        super().__init__(
            chunk_numbers,
            cannot_compare="",
            stats=lambda: self.counted,
            load=lambda: self.reported,
            work_on_probes=lambda: _taken(self.results),
            prompts=deque(),
            answers=deque(),
            computed=deque(),
            marked=deque(),
            finished=deque(),
        )


def _taken(found: list[_T]) -> list[_T]:
    return [found.pop(0) for _ in range(len(found))]


class _Inside:
    """Runs in the replica's process; each public method is a command."""

    def __init__(self, name: str, rows: int, row_bytes: int, namespace: str, options: Any) -> None:
        fingerprint_fields = options.pop("fingerprint_fields", None)
        self.engine = StillEngine()
        factor = options.pop("factor", 1.0)
        self.engine.cannot_compare = options.pop("cannot_compare", "")
        self.lines = _Lines()
        logging.getLogger("xinference_xavier").addHandler(self.lines)
        logging.getLogger("xinference_xavier").setLevel(logging.INFO)
        # Names of sockets are the host's, and other tests have replicas of the same name.
        for module in (region_module, neighbours_module):
            module.socket_name = lambda own: f"\0{options['tracker_address']}-{own}"  # type: ignore[attr-defined]
        self.region = Region.create(rows, row_bytes)
        serve_region(self.region, name)
        self.pool = Pool(rows)
        self.replica = Replica(
            XavierConfig(**options),
            engine=self.engine,
            tier=PeerTier(self.pool, Index(Peers(name)), NoDisk()),
            namespace=namespace,
            key_bytes=KEY_BYTES,
            window=Window(self.region),
            fingerprint_fields=fingerprint_fields,
        )
        self.fetching: Fetch | None = None
        self.began = 0.0
        if factor is not None and not self.engine.cannot_compare:
            self.replica.canary.computed("short", sketch(factor))
        self.replica.start()

    def store(self, keys: Sequence[bytes]) -> int:
        rows, evicted = self.pool.reserve(keys)
        self.replica.tier.on_evicted(evicted)
        for row in rows:
            self.region.row(row.slot)[:] = content(row.key, self.region.row_bytes)
        self.replica.tier.on_stored([row for row in rows if self.pool.commit(row)])
        return len(rows)

    def fetch(self, donor: str, keys: Sequence[bytes], timeout: float) -> Outcome:
        """Fetch rows; return once the fetch is decided."""
        self.begin_fetch(donor, keys, timeout)
        return self.end_fetch()

    def begin_fetch(self, donor: str, keys: Sequence[bytes], timeout: float) -> None:
        rows, evicted = self.pool.reserve(keys)
        assert len(rows) == len(keys)
        for row in rows:
            row.origin = donor
        self.replica.tier.on_evicted(evicted)
        self.began = time.monotonic()
        self.fetching = self.replica.tier.submit_load(donor, rows, self.began + timeout)

    def end_fetch(self) -> Outcome:
        fetch = self.fetching
        assert fetch is not None
        while fetch.state is FetchState.PENDING:
            threading.Event().wait(0.0005)
        seconds = time.monotonic() - self.began
        self.pool.unpin(fetch.committed)
        return Outcome(fetch.state.name, fetch.reason, len(fetch.committed), seconds)

    def arrived(self) -> int:
        """How many rows of the current fetch have arrived in full."""
        assert self.fetching is not None
        return sum(map(self._is_right, self.fetching.rows))

    def filled(self) -> int:
        """How many rows of the pool have the right bytes, whatever their state."""
        return sum(map(self._is_right, self.pool.rows()))

    def _is_right(self, row: Row) -> bool:
        right = content(row.key, self.region.row_bytes)
        return np.array_equal(self.region.row(row.slot), right)

    def evict(self, keys: Sequence[bytes]) -> None:
        """Evict exactly these chunks, as if the pool had run out of room."""
        filler = [make_key(-1 - n) for n in range(self.pool.slots)]
        kept = [key for key in shared_keys(self.pool) if key not in set(keys)]
        self.pool.touch(kept)
        rows, evicted = self.pool.reserve(filler[: self.pool.slots - len(kept)])
        assert set(keys) <= set(evicted)
        for row in rows:
            self.pool.abort(row)
        self.replica.tier.on_evicted(evicted)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Evict without telling the tracker, as if the withdrawal were still on its way."""
        tell, self.replica.tier.on_evicted = self.replica.tier.on_evicted, lambda keys: None  # type: ignore[method-assign]
        try:
            self.evict(keys)
        finally:
            self.replica.tier.on_evicted = tell  # type: ignore[method-assign]

    def held(self) -> list[bytes]:
        return shared_keys(self.pool)

    def wrong_rows(self) -> list[bytes]:
        """Keys of READY rows with wrong bytes."""
        ready = filter(None, map(self.pool.lookup, shared_keys(self.pool)))
        return [row.key for row in ready if not self._is_right(row)]

    def holders(self, key: bytes) -> tuple[str, ...]:
        return usable_holders(self.replica.index, key)

    def all_holders(self, key: bytes) -> tuple[str, ...]:
        """Also those that nothing is fetched from."""
        return all_holders(self.replica.index, key)

    def counts(self) -> PoolCounts:
        return self.pool.counts()

    def stats(self) -> dict[str, Any]:
        return self.replica.stats()

    def computed(self, name: str, factor: float) -> None:
        """Do what happens when the engine has computed the canary `name`."""
        self.engine.results.append(Computed(name, sketch(factor)))

    def audited(self, donor: str) -> None:
        """Do what happens when the engine has computed other rows than `donor` gave."""
        self.engine.results.append(Audited(donor, Difference("layer 1", 0.5)))

    def count(self, engine_stats: dict[str, Any]) -> None:
        """Set the engine's counts."""
        self.engine.counted = engine_stats

    def use(self, prompts: Sequence[Sequence[bytes]]) -> None:
        """Act as if requests with these prompts had ended."""
        self.engine.finished += prompts

    def report_load(self, load: Load | None) -> None:
        """Report this load from now on; None: none."""
        self.engine.reported = load

    def logged(self) -> list[tuple[str, str]]:
        """Levels and texts of log lines, from INFO up."""
        return self.lines.seen

    def transfer_stats(self) -> dict[str, Any]:
        asking = asyncio.run_coroutine_threadsafe(
            self.replica.process.stats(), self.replica._thread.loop
        )
        return asking.result(DEADLINE)

    def linked_to(self) -> dict[str, str]:
        """How the rows of each neighbour come."""
        return self.replica.neighbours.linked_to

    def obstacles(self) -> dict[str, str]:
        """Why nothing is loaded in place from a peer."""
        return self.replica.neighbours.obstacles

    def address(self, peer: str) -> str | None:
        return self.replica.peers.address(peer)

    def is_up(self) -> bool:
        """Whether it has joined and its transfer process knows the secret."""
        return self.replica._client.joined.is_set() and self.replica.process.ready

    def is_warm(self) -> bool:
        """Whether it takes requests."""
        return self.replica.hot_chunks.joined.is_set()

    def reset(self) -> None:
        self.replica.tier.reset()

    def namespace(self) -> str:
        """The namespace that it is a member of."""
        return self.replica.namespace.current if self.replica.tier.sharing else ""

    def stop(self) -> None:
        self.replica.stop()


class TrackerProcess(Remote):
    """A process with a real tracker; its commands are the tracker's methods."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        context: ForkServerContext | SpawnContext | None = None,
        **options: Any,
    ) -> None:
        """`options` are keyword arguments of the tracker."""
        super().__init__(_track, host, options, context=context)
        self.address: str = self.wait_until_ready()

    def set_weights_version(self, version: str) -> dict[str, list[str]]:
        told: dict[str, list[str]] = self.call("set_weights_version", version)
        return told

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The current status of each replica, with its namespace, by its incarnation."""
        return {
            each["incarnation"]: each | {"namespace": namespace}
            for namespace, known in self.call("status")["namespaces"].items()
            for each in known["replicas"]
        }

    def holdings(self) -> int:
        """Chunks that replicas have published."""
        return sum(each["holdings"] for each in self.replicas().values())

    def loads(self) -> list[str]:
        """The incarnations that have reported their load."""
        return [each.incarnation for each in self.call("observe", "", 0, 0, 0.0).loads]


def _track(pipe: Connection, host: str, options: dict[str, Any]) -> None:
    serve_actors(pipe, _create_tracker, options, address=f"{host}:0")


async def _create_tracker(pool: Any, options: dict[str, Any]) -> Any:
    # The one default thread is taken by commands, as all are in xinference's supervisor on two
    # processors.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    address, uid = pool.external_address, tracker_uid(MODEL)
    return await xoscar.create_actor(BlockTracker, MODEL, address=address, uid=uid, **options)


class ReplicaProcess(Remote):
    """A process with a replica; all other attributes are commands, the methods of `_Inside`.

    Its engine has computed a canary from the start, all the same; with a `factor` another one, with
    None not yet.
    """

    def __init__(
        self,
        name: str,
        tracker_address: str,
        *,
        rows: int = 64,
        row_bytes: int = ROW_BYTES,
        namespace: str = "namespace",
        **options: Any,
    ) -> None:
        options |= {"model_uid": MODEL, "tracker_address": tracker_address}
        super().__init__(obey, _Inside, name, rows, row_bytes, namespace, options, name=name)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self.call, method)

    def send_signal(self, number: signal.Signals, process: str = "engine") -> None:
        """Send a signal to the "engine" or to its "transfer" process."""
        os.kill(self.pid if process == "engine" else self.stats()["transfer_pid"], number)

    def close(self, seconds: float = PATIENCE) -> None:
        if self.process.is_alive():
            self.stop()
        self.kill()


@contextmanager
def all_up(starting: Iterable[ReplicaProcess]) -> Iterator[list[ReplicaProcess]]:
    """Wait until these replicas can fetch, and end them afterwards."""
    with ExitStack() as stack:
        started = [stack.enter_context(replica) for replica in starting]
        for replica in started:
            wait_until(replica.is_up, f"{replica.name} is up")
        yield started


def replicas(
    tracker_address: str, transports: Mapping[str, str], **options: Any
) -> AbstractContextManager[list[ReplicaProcess]]:
    """Replicas by name."""
    return all_up(
        ReplicaProcess(name, tracker_address, transport=transport, **options)
        for name, transport in transports.items()
    )


def stored(consumer: ReplicaProcess, *donors: ReplicaProcess, count: int = 8) -> list[bytes]:
    """Fresh chunks that all `donors` hold, as `consumer` knows."""
    keys = fresh_keys(count)
    for donor in donors:
        donor.store(keys)
        wait_until_known(consumer, donor, keys)
    return keys


def wait_until_known(consumer: ReplicaProcess, donor: ReplicaProcess, keys: list[bytes]) -> None:
    wait_until(
        lambda: all(donor.name in consumer.holders(key) for key in keys),
        f"{consumer.name} knows what {donor.name} holds",
    )


def is_free(replica: ReplicaProcess) -> bool:
    """Whether no row is being filled or pinned, and nothing is granted."""
    counts = replica.counts()
    left = counts.filling, counts.pinned, counts.quarantined, replica.stats()["grants"]
    return left == (0, 0, 0, 0)

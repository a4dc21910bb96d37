"""Replicas that share an index through a real tracker, which may hang, die and come back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import xoscar as xo

from tests.harness.comparisons import all_holders, compared, sketch
from tests.harness.replicas import TrackerProcess
from tests.tracker_pools import MODEL, create_tracker, let_others_run
from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotFoundError
from xinference_xavier.events import TrackerLost, event_dict
from xinference_xavier.index import PIECE, Index
from xinference_xavier.peers import Peers as Members
from xinference_xavier.pool.pool import Row, RowState
from xinference_xavier.protocol.load import Load, Observation, Serving
from xinference_xavier.protocol.sketches import Difference
from xinference_xavier.protocol.tracker import (
    SHORT_KEY,
    Change,
    Comparison,
    Outcome,
    Update,
    Verdict,
    tracker_uid,
)
from xinference_xavier.replica import reports as reports_module
from xinference_xavier.replica import tracker_client as client_module
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import EventReporter, Identity, LoadReporter, Publisher
from xinference_xavier.replica.tracker_client import Claim, TrackerClient, TrackerLocation
from xinference_xavier.tracker.actor import BlockTracker

K1, K2, K3 = b"key 00000001", b"key 00000002", b"key 00000003"
PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


class WatchedIndex(Index[Members]):
    """An index whose updates can be waited for."""

    def __init__(self, own: str) -> None:
        super().__init__(Members(own))
        self.snapshots = 0
        self._applied_one = asyncio.Event()

    def apply_in_pieces(self, update: Update) -> Iterator[None]:
        yield from super().apply_in_pieces(update)
        self.snapshots += update.snapshot
        self._applied_one.set()

    def known_holders(self, key: bytes) -> tuple[str, ...]:
        """Whether or not they serve."""
        return all_holders(self, key)

    async def until(self, true: Callable[[WatchedIndex], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not true(self):
                self._applied_one.clear()
                await self._applied_one.wait()


def reporter(load: Load | None) -> LoadReporter:
    ready = asyncio.Event()
    ready.set()
    return LoadReporter(lambda: load, deque(), deque(), ready)


class Process:
    """A transfer process that is ready when a test says so."""

    def __init__(self) -> None:
        self.secrets: list[bytes] = []
        self.ready = False
        self.ready_changed = asyncio.Event()

    async def configure(self, secret: bytes) -> None:
        self.secrets.append(secret)

    def set_ready(self, ready: bool) -> None:
        self.ready = ready
        self.ready_changed.set()


class Holdings(set[bytes]):
    """The keys of a pool, all of which may be shared."""

    def rows(self) -> list[Row]:
        return [Row(key, 0, RowState.READY, checksum=0) for key in self]


class Peer:
    """A replica: its pool, client and index. `find` finds the tracker."""

    def __init__(
        self,
        name: str,
        find: Callable[[], Awaitable[str]],
        *,
        namespace: str = "namespace",
        stats: Callable[[], dict[str, object]] = dict,
        **arguments: Any,
    ) -> None:
        async def search() -> str:
            self.searching.set()
            return await find()

        self._name = name
        self._stats = stats
        self.searching = asyncio.Event()
        self.pool = Holdings()
        self.process = Process()
        self.index = WatchedIndex(name)
        self.namespace = SharedNamespace(namespace, self.index, NoDisk())
        own, publisher = Identity(MODEL, name, ""), Publisher(name, cast(Any, self.pool))
        events = arguments.pop("events", EventReporter(own))
        self.canary = Canary(self.index.members, self.namespace, NoDisk(), publisher, events)
        self.canary.computed("short", sketch())
        location: Any = SimpleNamespace(find=search)
        process: Any = self.process
        self.client = TrackerClient(
            own,
            location,
            index=self.index,
            namespace=self.namespace,
            canary=self.canary,
            publisher=publisher,
            process=process,
            events=events,
            load_reporter=arguments.pop("load_reporter", reporter(None)),
        )
        assert not arguments
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        running = self.client.run(f"{self._name}.example:1", self._stats)
        self.task = asyncio.create_task(running)
        async with asyncio.timeout(PATIENCE):
            await self.client.joined.wait()
        self.searching.clear()

    async def crash(self) -> None:
        """Stop without a word to the tracker."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    def store(self, *keys: bytes) -> None:
        self.pool.update(keys)
        self.client.publisher.enqueue(keys, held=True)

    def evict(self, *keys: bytes) -> None:
        self.pool.difference_update(keys)
        self.client.publisher.enqueue(keys, held=False)
        self.client.publisher.flush()

    async def sees(self, key: bytes, *holders: str) -> None:
        await self.index.until(lambda index: index.known_holders(key) == holders)


class Peers:
    """Makes peers that find the tracker at `address`."""

    def __init__(self, address: str) -> None:
        self.address: str | None = address
        self.tracker: Any = None
        self.all: list[Peer] = []

    async def new_tracker(self, **arguments: float) -> None:
        self.tracker = await create_tracker(self.address, **arguments)

    async def locate(self) -> str:
        if self.address is None:
            raise ConnectionError("no tracker to be found")
        return self.address

    async def start(self, name: str, *keys: bytes, **arguments: Any) -> Peer:
        peer = self.make(name, *keys, **arguments)
        await peer.start()
        return peer

    async def start_two(self, *keys: bytes) -> tuple[Peer, Peer]:
        """`a` with `keys`, and `b`, which knows that `a` holds them."""
        a, b = await self.start("a", *keys), await self.start("b")
        for key in keys:
            await b.sees(key, "a")
        return a, b

    def make(self, name: str, *keys: bytes, **arguments: Any) -> Peer:
        peer = Peer(name, self.locate, **arguments)
        peer.pool.update(keys)
        self.all.append(peer)
        return peer

    async def lose_tracker(self) -> None:
        """All running peers have noticed it on return."""
        await xo.destroy_actor(self.tracker)
        await until_lost(*(peer for peer in self.all if peer.task and not peer.task.done()))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """They notice the loss of their tracker soon."""
    monkeypatch.setattr(client_module, "HEARTBEAT", 0.05)


@pytest.fixture
async def peers(pool: Any) -> AsyncIterator[Peers]:
    """Replicas to be started, and a tracker that runs."""
    peers = Peers(pool.external_address)
    await peers.new_tracker()
    yield peers
    for peer in peers.all:
        await peer.crash()


async def test_what_a_replica_publishes_and_withdraws_the_others_list(peers: Peers) -> None:
    a, b = await peers.start_two()
    a.store(K1, K2)
    await b.sees(K1, "a")
    await b.sees(K2, "a")
    a.evict(K1)
    await b.sees(K1)
    assert b.index.known_holders(K2) == ("a",)
    assert b.index.members.address("a") == "a.example:1"
    assert b.index.snapshots == 1, "it asks only for what is new"
    assert a.index.known_holders(K2) == ()


async def test_keys_queued_together_travel_as_one_publication_with_their_net_effect(
    peers: Peers,
) -> None:
    a, b = await peers.start_two(K3)
    a.store(K1)
    a.store(K2)
    a.evict(K1)
    a.evict(K3)
    a.store(K3)
    await b.sees(K2, "a")
    assert (b.index.known_holders(K1), b.index.known_holders(K3)) == ((), ("a",))
    assert a.client.publisher.batches == 1
    assert a.client.publisher.last_sequence == 2


async def test_withdrawn_keys_wait_for_the_next_held_ones(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication takes time from the engine and the tracker."""
    monkeypatch.setattr(reports_module, "FLUSH_DELAY", 0.0)
    a, b = await peers.start_two(K1)
    a.client.publisher.enqueue([K1], held=False)
    b.store(K3)
    await a.sees(K3, "b")  # which takes longer than a publication
    assert a.client.publisher.batches == 0
    a.store(K2)
    await b.sees(K2, "a")
    assert b.index.known_holders(K1) == ()
    assert a.client.publisher.batches == 1


async def test_a_snapshot_replaces_a_queue_that_is_too_long(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports_module, "MAX_QUEUED", 2)
    a, b = await peers.start_two()
    a.store(K1, K2, K3)
    a.evict(K2, K3)
    await b.sees(K1, "a")
    assert len(b.index) == 1
    assert (a.client.publisher.batches, a.client.publisher.replacements) == (0, 2)


async def test_two_replicas_of_one_incarnation_end_each_other_s_sessions(peers: Peers) -> None:
    errors: list[Exception | None] = []
    a = await peers.start("a", events=SimpleNamespace(tracker_session=errors.append, pending=()))
    await peers.tracker.publish("namespace", "a", 7, K1, b"", True)
    a.store(K2)
    await until_lost(a)
    assert errors[0] is None
    assert "another replica must not use this incarnation" in str(errors[1])


async def test_a_replica_serves_once_it_says_so(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not with the next heartbeat."""
    monkeypatch.setattr(client_module, "HEARTBEAT", 3600.0)
    a, b = await peers.start("a", K1), await peers.start("b")
    await b.sees(K1, "a")
    assert b.index.members.serving == frozenset()
    for serves in (True, False, True):
        a.process.set_ready(serves)
        await b.index.until(lambda index, serves=serves: ("a" in index.members.serving) is serves)
    assert b.index.known_holders(K1) == ("a",)


async def until_loads(tracker: Any, *incarnations: str) -> Observation:
    """What a router learns once the tracker knows the loads of these replicas, and no others."""
    version = 0
    async with asyncio.timeout(PATIENCE):
        while True:
            await tracker.observe("", 0, version, PATIENCE)
            found: Observation = await tracker.observe("", 0, 0, 0.0)
            if {each.incarnation for each in found.loads} == set(incarnations):
                return found
            version = found.version


async def test_routers_learn_a_replica_s_load_until_it_leaves(peers: Peers) -> None:
    """A new tracker is told at once, too."""
    load = Load(Serving(128, 4096), prefill_tokens=7, prefill_s=None, requests=1)
    a = await peers.start("a", load_reporter=reporter(load))
    await peers.start("b")
    found = await until_loads(peers.tracker, "a")
    assert [each.load for each in found.loads] == [load]
    await xo.destroy_actor(peers.tracker)
    await peers.new_tracker()
    await until_loads(peers.tracker, "a")
    await a.client.leave()
    await until_loads(peers.tracker)


async def test_heartbeats_carry_events(peers: Peers) -> None:
    """Each event once. If there are too many, the oldest are dropped."""

    def outage(reason: str) -> dict[str, Any]:
        return event_dict(TrackerLost(model_uid=MODEL, incarnation="a", reason=reason))

    async def reported(number: int) -> list[str | None]:
        """The reasons of the events, once there are `number`."""
        async with asyncio.timeout(PATIENCE):
            while len(records := await peers.tracker.events()) < number:  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.01)
        return [event.get("reason") for _, event in records]

    pending = deque([outage("1")], maxlen=2)
    events = SimpleNamespace(tracker_session=lambda error: None, pending=pending)
    await peers.start("a", events=events)
    assert await reported(2) == [None, "1"], "the first one is ReplicaJoined"
    pending += [outage("2"), outage("3"), outage("4")]
    assert await reported(4) == [None, "1", "3", "4"]


async def test_heartbeats_carry_stats(peers: Peers) -> None:
    asked = asyncio.Semaphore(0)

    def stats() -> dict[str, object]:
        asked.release()
        return {"requests": 5}

    await peers.start("a", stats=stats)
    async with asyncio.timeout(PATIENCE):
        # When it is asked for the second ones, the first ones have arrived.
        await asked.acquire()
        await asked.acquire()
    (replica,) = (await peers.tracker.status())["namespaces"]["namespace"]["replicas"]
    assert replica["stats"] == {"requests": 5, "stale": True}


async def test_failing_stats_do_not_end_the_membership(peers: Peers) -> None:
    failed = asyncio.Event()

    def stats() -> dict[str, object]:
        if a.client.counts.stats_failures:
            failed.set()
        raise RuntimeError("no stats today")

    a = peers.make("a", stats=stats)
    await a.start()
    await asyncio.wait_for(failed.wait(), PATIENCE)
    assert (a.client.joined.is_set(), a.client.counts.failures) == (True, 0)


async def test_a_lost_tracker_is_filled_again_by_its_replicas(peers: Peers) -> None:
    """They say what they hold, who serves, and whether sharing is switched off."""
    a, b = await peers.start_two(K1)
    assert a.process.secrets == b.process.secrets == [a.client.secret]
    a.process.set_ready(True)
    await peers.tracker.set_enabled(False)
    await a.index.until(lambda index: not index.members.enabled)
    await peers.lose_tracker()
    a.store(K2)
    assert b.index.known_holders(K1) == ("a",), "the peer is still there, the tracker alone is not"
    await peers.new_tracker()
    await a.client.joined.wait()
    await b.client.joined.wait()
    await b.sees(K2, "a")
    await b.sees(K1, "a")
    await b.index.until(lambda index: index.members.serving == {"a"})
    b.store(K3)
    await a.sees(K3, "b")
    assert len(a.process.secrets) == 2
    assert a.process.secrets[0] != a.process.secrets[1] == b.process.secrets[1]
    assert not (await peers.tracker.status())["enabled"]
    assert not a.index.members.enabled


async def test_a_tracker_is_found_where_it_is_now(peers: Peers) -> None:
    elsewhere = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    try:
        a, b = await peers.start_two(K1)
        peers.address = None
        await peers.lose_tracker()
        peers.address = elsewhere.external_address
        await peers.new_tracker()
        a.store(K2)
        await b.sees(K2, "a")
    finally:
        for peer in peers.all:
            await peer.crash()
        await elsewhere.stop()


async def test_a_replica_that_leaves_is_gone_at_once_and_stays_away(peers: Peers) -> None:
    a, b = await peers.start_two(K1)
    await a.client.leave()
    await b.sees(K1)
    await asyncio.wait_for(a.task, PATIENCE)
    assert not a.client.joined.is_set()


async def test_a_replica_that_was_removed_by_mistake_joins_again(peers: Peers) -> None:
    a, b = await peers.start_two(K1)
    await peers.tracker.leave("namespace", "a")
    await b.sees(K1)
    await b.sees(K1, "a")
    assert len(a.process.secrets) == 2


async def test_a_replica_whose_publication_nobody_knows_joins_again(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may publish before it notices that it was removed."""
    a, b = await peers.start_two()

    async def unknown(*publication: Any) -> Outcome:
        monkeypatch.undo()
        return Outcome.UNKNOWN

    monkeypatch.setattr(BlockTracker, "publish", unknown)
    a.store(K1)
    await b.sees(K1, "a")
    assert len(a.process.secrets) == 2


class DeafTracker(BlockTracker):
    """Applies most publications twice, and loses three that it acknowledges."""

    def __init__(self, model_uid: str, heard: asyncio.Semaphore) -> None:
        super().__init__(model_uid)
        self._heard = heard

    async def publish(
        self, namespace: str, incarnation: str, sequence: int, *batch: Any
    ) -> Outcome:
        self._heard.release()
        if sequence in (3, 6, 9):
            return Outcome.APPLIED
        outcome = await super().publish(namespace, incarnation, sequence, *batch)
        await super().publish(namespace, incarnation, sequence, *batch)
        return outcome


async def test_lost_and_repeated_publications_leave_no_trace(peers: Peers) -> None:
    heard = asyncio.Semaphore(0)
    await peers.lose_tracker()
    await xo.create_actor(DeafTracker, MODEL, heard, address=peers.address, uid=tracker_uid(MODEL))
    a, b = await peers.start_two()
    keys = (b"%012d" % number for number in range(1000))
    while a.client.publisher.last_sequence < 12:
        a.store(next(keys), next(keys))
        a.evict(min(a.pool))
        async with asyncio.timeout(PATIENCE):
            await heard.acquire()
    await b.index.until(
        lambda index: (
            len(index) == len(a.pool) and all(index.known_holders(key) == ("a",) for key in a.pool)
        )
    )
    assert a.client.publisher.replacements > 1
    assert a.client.counts.failures == 0


async def test_changing_the_namespace_leaves_the_old_one_behind(peers: Peers) -> None:
    a, b = await peers.start("a", K1), await peers.start("b", K2)
    c = await peers.start("c", K3, namespace="other")
    await b.sees(K1, "a")
    await a.sees(K2, "b")
    a.pool.clear()
    await a.namespace.part("namespace", "other")
    assert (len(a.index), len(a.index.members), a.namespace.current) == (0, 0, "other")
    await b.sees(K1)
    await a.sees(K3, "c")
    a.store(K1)
    await c.sees(K1, "a")
    assert a.index.known_holders(K2) == b.index.known_holders(K1) == ()


async def test_the_namespace_can_change_while_the_tracker_is_lost(peers: Peers) -> None:
    a = await peers.start("a", K1)
    await peers.lose_tracker()
    await a.namespace.part("namespace", "other")
    await peers.new_tracker()
    b = await peers.start("b", namespace="other")
    await b.sees(K1, "a")


async def test_who_differs_is_known_before_the_rest_of_a_large_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What came from there is not used meanwhile."""
    monkeypatch.setattr(client_module, "PIECE_PAUSE", PATIENCE)
    found = Comparison(Verdict.DIFFERS, "", "a", Difference("layer", 0.5))
    met, unlike = compared("b"), compared("b")._replace(comparison=found)
    keys = b"".join(number.to_bytes(SHORT_KEY) for number in range(2 * PIECE))
    change = Change("b", 1, keys, b"", True)
    updates = [Update(1, "epoch", True, (met,)), Update(2, "epoch", False, (change, unlike))]
    a = Peer("a", asyncio.Event().wait)  # type: ignore[arg-type]
    monkeypatch.setattr(a.client, "_call", AsyncMock(side_effect=updates))
    watching = asyncio.create_task(a.client._watch("namespace"))
    await let_others_run()
    assert not watching.done()
    assert a.canary.stats.differing == 1
    watching.cancel()


async def test_a_replica_can_be_stopped_just_after_a_change_of_namespace(peers: Peers) -> None:
    a = await peers.start("a")
    await a.namespace.part("namespace", "other")
    async with asyncio.timeout(PATIENCE):
        await a.crash()


async def test_a_tracker_that_hangs_holds_nobody_up(
    stoppable_tracker: TrackerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process answers nothing, not even the request to cancel."""
    monkeypatch.setattr(client_module, "CALL_DEADLINE", 0.5)
    monkeypatch.setattr(client_module, "WATCH", 0.2)
    peers = Peers(stoppable_tracker.address)
    a, b = await peers.start("a", K1), await peers.start("b")
    await b.sees(K1, "a")
    suspend(stoppable_tracker)
    await until_lost(a, b)
    assert b.index.known_holders(K1) == ("a",)
    async with asyncio.timeout(PATIENCE):
        await b.client.leave()
    stoppable_tracker.send_signal(signal.SIGCONT)
    a.store(K2)
    c = await peers.start("c")
    await c.sees(K2, "a")
    for peer in peers.all:
        await peer.crash()


def suspend(tracker: TrackerProcess) -> None:
    """On return, none of its threads runs any more."""
    tracker.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, tracker.pid, os.WSTOPPED | os.WNOWAIT)


async def claimed(peer: Peer, *keys: bytes) -> int | None:
    claim = Claim(keys, seconds=10.0)
    await peer.client.claim(claim)
    return claim.held_by_peer


async def test_one_of_two_computes_what_both_want(peers: Peers) -> None:
    a, b = await peers.start_two()
    assert await claimed(a, K1, K2) == 0
    assert await claimed(b, K1, K2, K3) == 2
    await a.client.release(Claim([K1, K2], 10.0))
    assert await claimed(b, K1, K2, K3) == 0


async def test_without_a_tracker_everybody_computes(
    stoppable_tracker: TrackerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs, and one that is known to be lost and therefore not called: that it was killed
    is noticed at once."""
    monkeypatch.setattr(client_module, "CLAIM_DEADLINE", 0.2)
    for never in ("HEARTBEAT", "WATCH"):
        monkeypatch.setattr(client_module, never, 3600.0)
    peers = Peers(stoppable_tracker.address)
    a = await peers.start("a")
    suspend(stoppable_tracker)
    assert await claimed(a, K1) == 0
    assert a.client.counts.claim_failures == 1
    stoppable_tracker.kill()
    await until_lost(a)  # without a heartbeat
    assert await claimed(a, K1) == 0
    await a.client.release(Claim([K1], 10.0))
    assert a.client.counts.claim_failures == 1
    await a.crash()


async def until_lost(*lost: Peer) -> None:
    """Wait until these replicas have noticed that their tracker is gone."""
    async with asyncio.timeout(PATIENCE):
        for peer in lost:
            await peer.searching.wait()


CONFIGURED, NAMED = "10.0.0.1:9999", "127.0.0.1:7777"


class Supervisor(xo.StatelessActor):
    """Has the tracker of "running" in its own pool, at an address with a wildcard."""

    def __init__(self) -> None:
        super().__init__()
        self._known = {"running"}

    async def xavier_tracker_address(self, model_uid: str, create: bool, hooks: str | None) -> str:
        assert create
        assert hooks == "a:hook"
        if model_uid not in self._known:
            raise NotFoundError(f"model {model_uid!r} is not running here")
        return "0.0.0.0:7777"

    async def add_worker(self, model_uid: str) -> None:
        self._known.add(model_uid)


class Worker(xo.StatelessActor):
    """Runs "forgotten", which the supervisor learns when the worker registers again."""

    def __init__(self, supervisor: Any) -> None:
        super().__init__()
        self._supervisor = supervisor

    async def get_supervisor_ref(self, add_worker: bool) -> Any:
        if add_worker:
            await self._supervisor.add_worker("forgotten")
        return self._supervisor


@pytest.mark.parametrize(
    ("model", "then"),
    [
        ("running", [NAMED, NAMED]),
        ("other", [CONFIGURED, CONFIGURED]),
        ("forgotten", [CONFIGURED, NAMED]),
    ],
    ids=["known", "not known yet", "a restarted supervisor learns of it"],
)
async def test_a_lost_tracker_is_looked_for_at_the_worker_s_supervisor(
    pool: Any, model: str, then: list[str]
) -> None:
    """First at the configured address. The replica asks its worker to register at once; by itself
    it does so only every 15 s."""
    address = pool.external_address
    supervisor = await xo.create_actor(Supervisor, address=address, uid="supervisor")
    await xo.create_actor(Worker, supervisor, address=address, uid="worker")
    location = TrackerLocation(
        XavierConfig(model, CONFIGURED, hooks="a:hook", worker_address=address)
    )
    assert [await location.find() for _ in range(3)] == [CONFIGURED, *then]


async def test_without_a_worker_there_is_only_the_configured_address() -> None:
    location = TrackerLocation(XavierConfig("running", CONFIGURED))
    assert [await location.find() for _ in range(2)] == [CONFIGURED] * 2


async def test_a_lost_worker_is_an_error_for_the_caller_to_retry() -> None:
    location = TrackerLocation(XavierConfig("running", CONFIGURED, worker_address="127.0.0.1:1"))
    await location.find()
    with pytest.raises(OSError, match="Connect call failed"):
        await location.find()

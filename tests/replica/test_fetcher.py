"""A fetch brings a donor's rows byte for byte, or leaves no trace in both replicas' regions and
counters."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import CORRUPT_ROW
from tests.harness.comparisons import compared, compared_index
from tests.harness.replicas import (
    ROW_BYTES,
    ReplicaProcess,
    TrackerProcess,
    replicas,
    stored,
    wait_until,
    wait_until_known,
)
from tests.tracker_pools import let_others_run
from xinference_xavier.pool.pool import Pool, flush
from xinference_xavier.protocol.tracker import Comparison, Left, Member, News, Update, Verdict
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest, PullOrder, PullResult
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.fetcher import Fetch, Fetcher
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import Publisher

ROWS = 8
TIMEOUT = 30.0  # that no test here reaches


@pytest.fixture(scope="module", params=["gloo", "nixl", "shared_memory"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def all_replicas(
    tracker_process: TrackerProcess, transport: str
) -> Iterator[dict[str, ReplicaProcess]]:
    faulty = {
        "gloo": "CorruptingGloo",
        "nixl": "CorruptingNixl",
        "shared_memory": "CorruptingSharedMemory",
    }[transport]
    transports = {
        "alice": transport,
        "bob": "nixl" if transport == "nixl" else "auto",  # which has no RDMA port here
        "checked": f"tests.faults:{faulty}",
        "unchecked": f"tests.faults:Unchecked{faulty}",
    }
    # Grants live so long that only a release ends them here.
    with replicas(tracker_process.address, transports, fetch_timeout=10 * TIMEOUT) as started:
        yield {replica.name: replica for replica in started}


@pytest.fixture
def alice(all_replicas: dict[str, ReplicaProcess]) -> ReplicaProcess:
    return all_replicas["alice"]


@pytest.fixture
def bob(all_replicas: dict[str, ReplicaProcess]) -> ReplicaProcess:
    return all_replicas["bob"]


def assert_clean(consumer: ReplicaProcess, donor: ReplicaProcess) -> None:
    counts = consumer.counts()
    assert (counts.filling, counts.pinned, counts.quarantined) == (0, 0, 0)
    wait_until(lambda: donor.stats()["grants"] == 0, "the grant is released")
    assert donor.counts().pinned == 0


def bytes_by(replica: ReplicaProcess, transport: str) -> int:
    """Received over this transport."""
    stats = replica.stats()["fetches"]["by_transport"].get(transport)
    return 0 if stats is None else stats["bytes"]


@pytest.mark.process
def test_rows_arrive_byte_for_byte(
    alice: ReplicaProcess, bob: ReplicaProcess, transport: str
) -> None:
    keys = stored(bob, alice, count=5)
    fetches = bob.stats()["fetches"]
    before = bytes_by(bob, transport)
    outcome = bob.fetch("alice", keys, TIMEOUT)
    assert (outcome.state, outcome.reason, outcome.committed) == ("COMMITTED", None, 5)
    assert [bob.raw_row(key) for key in keys] == [alice.raw_row(key) for key in keys]
    assert bob.wrong_rows() == []
    assert bob.stats()["fetches"]["committed"] == fetches["committed"] + 1
    assert bytes_by(bob, transport) - before == 5 * ROW_BYTES
    assert bob.transfer_stats()["linked_to"]["alice"] == transport
    assert_clean(bob, alice)


@pytest.mark.process
@pytest.mark.parametrize("check", ["checked", "unchecked"])
def test_a_row_damaged_in_transit_never_becomes_a_hit(
    all_replicas: dict[str, ReplicaProcess], alice: ReplicaProcess, check: str
) -> None:
    """With the check switched off, the same damage becomes a hit."""
    consumer = all_replicas[check]
    keys = stored(consumer, alice, count=5)
    outcome = consumer.fetch("alice", keys, TIMEOUT)
    if check == "unchecked":
        assert outcome.state == "COMMITTED"
        assert consumer.wrong_rows() == [keys[CORRUPT_ROW]]
        return
    assert (outcome.state, outcome.reason) == ("ROLLED_BACK", "checksum")
    assert outcome.committed == CORRUPT_ROW, "the rows before it are intact"
    assert consumer.wrong_rows() == []
    assert not set(keys[CORRUPT_ROW:]) & set(consumer.held())
    assert consumer.stats()["fetches"]["rolled_back"] == {"checksum": 1}
    assert_clean(consumer, alice)


@pytest.mark.process
def test_a_stale_entry_is_a_miss_until_the_donor_publishes_again(
    alice: ReplicaProcess, bob: ReplicaProcess
) -> None:
    keys = stored(bob, alice, count=3)
    alice.forget(keys)
    outcome = bob.fetch("alice", keys, TIMEOUT)
    assert (outcome.state, outcome.reason, outcome.committed) == ("ROLLED_BACK", "not held", 0)
    assert bob.holders(keys[0]) == (), "it is not fetched again"
    assert_clean(bob, alice)
    alice.store(keys)
    wait_until_known(bob, alice, keys)
    assert bob.fetch("alice", keys, TIMEOUT).committed == 3
    assert bob.wrong_rows() == []


@pytest.mark.process
def test_the_leading_rows_that_the_donor_still_holds_are_fetched(
    alice: ReplicaProcess, bob: ReplicaProcess
) -> None:
    keys = stored(bob, alice, count=4)
    alice.forget(keys[2:3])
    outcome = bob.fetch("alice", keys, TIMEOUT)
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2)
    assert bob.holders(keys[2]) == ()
    assert bob.holders(keys[3]) == ("alice",)
    assert_clean(bob, alice)


@pytest.mark.process
def test_a_donor_grants_at_most_half_of_its_pool_and_the_rest_is_not_stale(
    alice: ReplicaProcess, bob: ReplicaProcess
) -> None:
    half = alice.counts().rows // 2
    keys = stored(bob, alice, count=half + 3)
    outcome = bob.fetch("alice", keys, TIMEOUT)
    assert (outcome.state, outcome.committed) == ("COMMITTED", half)
    assert all("alice" in bob.holders(key) for key in keys[half:])
    assert_clean(bob, alice)


@pytest.mark.process
def test_nothing_is_fetched_while_sharing_is_switched_off(
    tracker_process: TrackerProcess, alice: ReplicaProcess, bob: ReplicaProcess
) -> None:
    keys = stored(bob, alice, count=2)
    tracker_process.set_enabled(False)
    try:
        wait_until(lambda: not alice.enabled() and not bob.enabled(), "the switch arrived")
        assert bob.holders(keys[0]) == ()
        assert bob.fetch("alice", keys, TIMEOUT).reason == "sharing is off"
    finally:
        tracker_process.set_enabled(True)
    wait_until(lambda: alice.enabled() and bob.enabled(), "the switch arrived")
    assert bob.fetch("alice", keys, TIMEOUT).committed == 2


# -- without processes ---------------------------------------------------------------------------


class Fetching:
    """A fetcher. Its `donor` grants all that it is asked for, and the rows arrive when `arrive` is
    set; a session with the tracker ends when `may_end` is set."""

    def __init__(self) -> None:
        self.pool = Pool(ROWS)
        self.may_end, self.pulling, self.arrive = (asyncio.Event() for _ in range(3))
        self.rolled_back: list[str] = []
        self.donor: Any = SimpleNamespace(grant=self._grant, release=self._release)
        self.index = compared_index("own")
        self.namespace = SharedNamespace("namespace", self.index, NoDisk())
        events: Any = SimpleNamespace(
            rolled_back=lambda donor, reason, *_: self.rolled_back.append(reason)
        )
        process: Any = SimpleNamespace(pull=self._pull)
        self.fetcher = Fetcher(
            pool=self.pool,
            row_bytes=1,
            process=process,
            namespace=self.namespace,
            index=self.index,
            disk=NoDisk(),
            publisher=Publisher("own", self.pool),
            events=events,
        )

    async def session(self, _: str) -> None:
        """Ends only when it may."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()

    def update(self, *news: News) -> None:
        self.index.apply(Update(1, "epoch", False, news))
        for peer in self.index.members.values():
            peer.actor = self.donor

    def meet_donor(self) -> None:
        self.update(compared("donor"))

    def fetch(self) -> asyncio.Future[None]:
        rows = self.pool.reserve([b"key"], redundant=None).rows
        rows[0].origin = "donor"
        deadline = asyncio.get_running_loop().time() + 60.0
        return self.fetcher.start(Fetch("donor", rows, deadline))

    async def _grant(self, request: GrantRequest) -> Grant:
        slots = tuple(range(len(request.keys)))
        endpoint = Endpoint("127.0.0.1:1", None)
        return Grant(1, slots, (0,) * len(slots), 1.0, endpoint, False, 1)

    async def _release(self, grant_id: int) -> None:
        pass

    async def _pull(self, order: PullOrder) -> PullResult:
        self.pulling.set()
        await self.arrive.wait()
        return PullResult(len(order.slots), None, "gloo")


@pytest.fixture
async def fetching() -> Fetching:
    return Fetching()


async def test_nothing_is_fetched_between_a_reset_and_the_move_to_another_namespace(
    fetching: Fetching,
) -> None:
    """A row that a warm join reserves just after the pool was reset would get the old weights'
    bytes."""
    session = asyncio.ensure_future(fetching.namespace.run_session(fetching.session))
    await let_others_run()
    fetching.namespace.announce_reset()
    fetching.pool.reset()
    isolating = asyncio.ensure_future(fetching.namespace.isolate())
    await fetching.fetch()
    fetching.may_end.set()
    await asyncio.gather(isolating, session)
    await fetching.fetch()
    assert fetching.rolled_back == ["reset", "donor gone"], "then it knows no peers"
    assert fetching.pool.counts().filling == 0


async def test_a_donor_that_was_not_compared_is_asked_for_nothing(fetching: Fetching) -> None:
    fetching.update(Member("donor", "host:1"))
    fetching.arrive.set()
    await fetching.fetch()
    assert fetching.rolled_back == ["not compared"]
    assert not fetching.pulling.is_set()


@pytest.mark.parametrize(
    ("meanwhile", "reason"),
    [
        ("nothing", None),
        ("what was fetched is in doubt", "reset"),
        ("differs", "not compared"),
        ("reset", "reset"),
    ],
)
async def test_rows_are_used_if_on_arrival_their_donor_is_still_known_to_compute_the_same(
    fetching: Fetching, meanwhile: str, reason: str | None
) -> None:
    fetching.meet_donor()
    ended = fetching.fetch()
    await fetching.pulling.wait()
    match meanwhile:
        case "what was fetched is in doubt":
            flush(fetching.pool, lambda row: row.origin is not None)
        case "differs":
            fetching.update(Left("donor", Comparison(Verdict.DIFFERS)))
        case "reset":
            fetching.pool.reset()
    fetching.arrive.set()
    await ended
    assert fetching.rolled_back == ([] if reason is None else [reason])
    assert (fetching.pool.lookup(b"key") is None) == (reason is not None)
    assert fetching.pool.counts().filling + fetching.pool.counts().quarantined == 0

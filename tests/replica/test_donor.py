"""A donor's promises: rows stay as long as promised, and not longer. What it offers has checksums,
which are computed off the scheduler thread, however fast rows come."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.harness.comparisons import compared, compared_index
from tests.tracker_pools import let_others_run
from xinference_xavier.errors import GrantRefusedError, LinkError
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.tracker import Settings, Update
from xinference_xavier.protocol.transfer import (
    MAX_ROWS_PER_FETCH,
    PROTOCOL_VERSION,
    Endpoint,
    GrantRequest,
)
from xinference_xavier.replica import donor as module
from xinference_xavier.replica.disk import Disk, NoDisk
from xinference_xavier.replica.donor import Checksums, Donor, Grants
from xinference_xavier.replica.kept_prefixes import Prompt
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import Publisher

A, B, C, D = (bytes([n]) for n in range(4))
LIFETIME = 10.0


@pytest.fixture
def pool() -> Pool:
    pool = Pool(4)
    for row in pool.reserve([A, B, C, D]).rows:
        pool.commit(row, checksum=row.slot)
    return pool


@pytest.fixture
def grants(pool: Pool) -> Grants:
    return Grants(pool, max_rows=3, lifetime=LIFETIME, borrowers={"near"})


def asked(
    consumer: str, keys: Sequence[bytes], number: int = 1, near: bool = False
) -> GrantRequest:
    return GrantRequest(PROTOCOL_VERSION, "namespace", consumer, number, tuple(keys), in_place=near)


def pinned(pool: Pool) -> int:
    return pool.counts().pinned


def test_granted_rows_stay_until_released(pool: Pool, grants: Grants) -> None:
    promise = grants.grant(asked("consumer", [A, B]), now=0)
    assert [row.key for row in promise.rows] == [A, B]
    assert promise.expires == LIFETIME
    assert pool.reserve([b"new1", b"new2", b"new3"]).evicted == [C, D]
    grants.release("consumer", 1)
    assert (pinned(pool), len(grants), grants.granted_rows) == (0, 0, 0)


def test_only_the_leading_run_is_promised(pool: Pool, grants: Grants) -> None:
    assert [row.key for row in grants.grant(asked("consumer", [A, b"?", B]), 0).rows] == [A]


def test_holding_nothing_is_no_promise(pool: Pool, grants: Grants) -> None:
    assert not grants.grant(asked("consumer", [b"?", A]), 0).rows
    assert len(grants) == 0


def test_promises_are_bounded_over_all_consumers(pool: Pool, grants: Grants) -> None:
    grants.grant(asked("one", [A, B]), 0)
    assert [row.key for row in grants.grant(asked("two", [C, D]), 0).rows] == [C]
    with pytest.raises(GrantRefusedError, match="busy"):
        grants.grant(asked("three", [D]), 0)
    assert grants.granted_rows == pinned(pool) == 3
    grants.release("one", 1)
    assert grants.grant(asked("three", [D]), 0).rows


def test_a_row_that_many_ask_for_is_promised_to_all(pool: Pool, grants: Grants) -> None:
    for number in range(5):
        assert grants.grant(asked("near", [A, B], number, near=True), 0).rows
    assert grants.granted_rows == 2
    grants.borrower_ended("near")
    assert grants.granted_rows == pinned(pool) == 0


def test_a_load_in_place_gets_all_its_rows(pool: Pool, grants: Grants) -> None:
    """It keeps them until its end, and a part of a prefix may be of no use."""
    grants.grant(asked("copies", [A, B]), 0)
    assert [row.key for row in grants.grant(asked("near", [C, D], near=True), 0).rows] == [C, D]


def test_what_is_granted_already_is_granted_to_others_too(pool: Pool, grants: Grants) -> None:
    grants.grant(asked("one", [A, B, C]), 0)
    assert [row.key for row in grants.grant(asked("two", [A, B, C]), 0).rows] == [A, B, C]
    with pytest.raises(GrantRefusedError, match="busy"):
        grants.grant(asked("two", [B, D], 2), 0)
    grants.release("one", 1)
    assert grants.granted_rows == pinned(pool) == 3


def test_an_expired_promise_makes_room(pool: Pool, grants: Grants) -> None:
    grants.grant(asked("gone", [A, B, C]), 0)
    with pytest.raises(GrantRefusedError):
        grants.grant(asked("other", [D]), LIFETIME - 0.001)
    assert grants.grant(asked("other", [D]), LIFETIME).rows
    assert pinned(pool) == 1


def test_expiry_ends_only_what_is_due(pool: Pool, grants: Grants) -> None:
    grants.grant(asked("early", [A]), 0)
    grants.grant(asked("late", [B]), 5)
    grants.expire(LIFETIME)
    assert len(grants) == pinned(pool) == 1
    grants.expire(LIFETIME + 5)
    assert len(grants) == pinned(pool) == 0


def test_promises_to_the_dead_end_at_once(pool: Pool, grants: Grants) -> None:
    grants.grant(asked("dead", [A]), 0)
    grants.grant(asked("alive", [B]), 0)
    grants.release_except(frozenset({"alive"}))
    assert len(grants) == pinned(pool) == grants.granted_rows == 1


def test_what_is_loaded_in_place_stays_until_it_is_released_however_long_that_takes(
    pool: Pool, grants: Grants
) -> None:
    """The consumer may stand still in the middle of a load, and lose its lease."""
    grants.grant(asked("near", [A], 1, near=True), 0)
    grants.expire(1000 * LIFETIME)
    grants.release_except(frozenset())
    assert pinned(pool) == 1
    grants.release("near", 1)
    assert pinned(pool) == 0


def test_what_is_loaded_in_place_is_free_once_the_process_has_ended(
    pool: Pool, grants: Grants
) -> None:
    """What it has asked for to copy ends by itself: late bytes may be on their way."""
    grants.grant(asked("near", [A], 1, near=True), 0)
    grants.grant(asked("near", [B], 2), 0)
    grants.grant(asked("other", [C], 1), 0)
    grants.borrower_ended("near")
    assert (pinned(pool), grants.granted_rows) == (2, 2)


def test_nothing_is_lent_to_one_whose_end_would_not_be_noticed(pool: Pool, grants: Grants) -> None:
    with pytest.raises(GrantRefusedError, match="donor gone"):
        grants.grant(asked("far", [A], 1, near=True), 0)
    assert pinned(pool) == 0


def test_what_was_given_up_before_it_was_granted_is_not_lent(pool: Pool, grants: Grants) -> None:
    """A donor that stood still may read the messages in any order, and nobody would release it."""
    grants.release("near", 7)
    with pytest.raises(GrantRefusedError, match="reset"):
        grants.grant(asked("near", [A], 7, near=True), 0)
    grants.grant(asked("near", [A], 8, near=True), 0)
    assert pinned(pool) == 1


REQUEST = GrantRequest(PROTOCOL_VERSION, "namespace", "consumer", 1, (A,), False)


class Scene:
    """A donor that has joined a namespace with one consumer."""

    def __init__(self, pool: Pool, disk: Disk) -> None:
        self.process: Any = SimpleNamespace(endpoint=Endpoint("host:1"), ready=True)
        self.index = compared_index("own")
        self.namespace = SharedNamespace("namespace", self.index, disk)
        publisher = Publisher("own", pool)
        self.finished: deque[Prompt] = deque()
        self.donor = Donor(
            pool,
            self.index.members,
            disk,
            self.process,
            self.namespace,
            publisher,
            self.finished,
            LIFETIME,
        )
        self.join()

    def join(self) -> None:
        members = (compared("consumer"),)
        self.index.members.set_compared(True)
        self.index.apply(Update(1, "epoch", True, members))


@pytest.fixture
def scene(pool: Pool) -> Scene:
    return Scene(pool, NoDisk())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (REQUEST._replace(version=PROTOCOL_VERSION + 1), "run the same version"),
        (REQUEST._replace(keys=(A,) * (MAX_ROWS_PER_FETCH + 1)), "too many rows"),
        (REQUEST._replace(namespace="another"), "other namespace"),
        (REQUEST._replace(consumer="stranger"), "not compared"),
    ],
    ids=["another version", "too many keys", "of another namespace", "a stranger"],
)
def test_what_is_not_granted_pins_nothing(
    scene: Scene, pool: Pool, request_: Any, reason: str
) -> None:
    with pytest.raises((LinkError, GrantRefusedError), match=reason):
        scene.donor.grant(request_)
    assert pinned(pool) == 0
    assert scene.donor.grant(REQUEST).slots


def test_a_donor_without_a_transfer_process_grants_nothing(scene: Scene) -> None:
    scene.process.endpoint = None
    with pytest.raises(GrantRefusedError, match="no transfer process"):
        scene.donor.grant(REQUEST)


def test_a_donor_grants_nothing_while_sharing_is_switched_off(scene: Scene) -> None:
    scene.index.apply(Update(2, "epoch", True, (Settings(enabled=False),)))
    with pytest.raises(GrantRefusedError, match="sharing is off"):
        scene.donor.grant(REQUEST)


async def test_a_donor_grants_nothing_from_a_reset_until_its_peers_have_followed(
    scene: Scene,
) -> None:
    """A peer with the old weights may not know of it."""
    scene.namespace.announce_reset()
    with pytest.raises(GrantRefusedError, match="sharing is off"):
        scene.donor.grant(REQUEST)
    await scene.namespace.isolate()
    with pytest.raises(GrantRefusedError, match="other namespace"):
        scene.donor.grant(REQUEST)
    request = REQUEST._replace(namespace=scene.namespace.current)
    with pytest.raises(GrantRefusedError, match="not compared"):
        scene.donor.grant(request)
    scene.join()
    assert scene.donor.grant(request).slots


async def test_links_and_grants_of_a_replica_that_is_gone_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links first: while one is open, granted rows may be in flight."""
    monkeypatch.setattr(module, "TICK", 0.0)
    scene.donor.grant(REQUEST)
    ended: list[int] = []

    async def close_links_except(peers: frozenset[str]) -> None:
        if not peers:
            ended.append(len(scene.donor.grants))

    scene.process.close_links_except = close_links_except
    running = asyncio.create_task(scene.donor.run())
    await let_others_run()
    assert (ended, len(scene.donor.grants)) == ([], 1)
    scene.index.apply(Update(2, "epoch", True, ()))
    await let_others_run()
    running.cancel()
    await asyncio.wait({running})
    assert ended[0] == 1
    assert len(scene.donor.grants) == 0


def test_what_a_peer_gets_counts_as_used(pool: Pool) -> None:
    """The disk saves what was used twice."""
    used: list[bytes] = []
    disk = NoDisk()
    disk.used = used.extend  # type: ignore[method-assign]
    Scene(pool, disk).donor.grant(REQUEST._replace(keys=(A, B, b"not held")))
    assert used == [A, B]


def test_what_a_neighbour_loads_counts_as_a_prompt_of_the_own_engine(scene: Scene) -> None:
    """It is handed over before the replica leaves, although no own request has used it."""
    scene.donor.lending.borrowers["consumer"] = Mock()
    scene.donor.grant(REQUEST._replace(keys=(A, B, b"not held"), in_place=True))
    assert [*scene.finished] == [(A, B)]


def test_two_promises_of_one_row_both_count(pool: Pool, grants: Grants) -> None:
    grants.grant(asked("one", [A]), 0)
    grants.grant(asked("two", [A]), 0)
    grants.release("one", 1)
    grants.release("one", 1)  # a release may come twice, or after the expiry
    assert pinned(pool) == 1
    grants.release("two", 1)
    assert pinned(pool) == 0


SLOTS = 4
PATIENCE = 30.0


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create(SLOTS, 4096)
    yield region
    region.close()


@pytest.fixture
def empty() -> Pool:
    return Pool(SLOTS)


class Offers(Publisher):
    """Collects the offered keys, and announces each offer."""

    def __init__(self, pool: Pool) -> None:
        super().__init__("own", pool)
        self.keys: list[bytes] = []
        self.changed = asyncio.Event()

    def enqueue(self, keys: Iterable[bytes], *, held: bool) -> None:
        assert held
        self.keys += keys
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.keys) < count:
                await self.changed.wait()
                self.changed.clear()


@pytest.fixture
async def offers(empty: Pool) -> Offers:
    return Offers(empty)


@pytest.fixture
async def checksums(region: Region, empty: Pool, offers: Offers) -> AsyncIterator[Checksums]:
    checksums = Checksums(region, empty, offers)
    running = asyncio.create_task(checksums.run())
    yield checksums
    running.cancel()
    await asyncio.wait({running})


def store(pool: Pool, *keys: bytes) -> list[Row]:
    rows = pool.reserve(keys).rows
    for row in rows:
        pool.commit(row)
    return rows


async def test_stored_rows_are_offered_with_their_checksums(
    checksums: Checksums, region: Region, empty: Pool, offers: Offers
) -> None:
    rows = store(empty, b"one", b"two")
    region.row(rows[0].slot)[:] = 7
    checksums.add(rows)
    await offers.until(2)
    assert offers.keys == [b"one", b"two"]
    assert [row.checksum for row in rows] == [region.checksum(r.slot, r.key) for r in rows]
    assert empty.counts().pinned == 0
    checksums.add(store(empty, b"three"))
    await offers.until(3)


async def test_rows_evicted_meanwhile_are_not_offered(
    checksums: Checksums, empty: Pool, offers: Offers
) -> None:
    gone = store(empty, b"gone")
    empty.reset()
    checksums.add([*gone, *store(empty, b"here")])
    await offers.until(1)
    assert offers.keys == [b"here"]


async def test_at_most_one_row_per_slot_waits(
    checksums: Checksums,
    region: Region,
    empty: Pool,
    offers: Offers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that has left its slot makes way for the next one there. Otherwise the queue would grow
    while rows are stored faster than their checksums are computed."""
    proceed, at_work = threading.Event(), threading.Event()
    sums = region.checksum

    def slowly(slot: int, key: bytes) -> int:
        at_work.set()
        proceed.wait(PATIENCE)
        return sums(slot, key)

    monkeypatch.setattr(region, "checksum", slowly)
    checksums.add(store(empty, b"first"))
    await asyncio.to_thread(at_work.wait, PATIENCE)
    for number in range(100):
        checksums.add(store(empty, b"%d" % number))
    assert len(checksums._waiting) <= SLOTS
    proceed.set()
    await offers.until(SLOTS)
    assert set(offers.keys) == {b"first", b"97", b"98", b"99"}
    assert (empty.counts().pinned, len(checksums._waiting)) == (0, 0)

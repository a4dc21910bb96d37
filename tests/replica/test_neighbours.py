"""Replicas of a host map each other's pools, and lend their rows for as long as something may read
them: the kernel says when a process has ended. Here, a process is what a replica has open."""

import asyncio
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.harness.comparisons import compared, compared_index, snapshot
from tests.harness.replicas import content, fresh_keys
from tests.replica.consumers import NEVER, Consumer, fill
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region, serve_region
from xinference_xavier.pool.window import Order, WindowServer
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest, PullResult
from xinference_xavier.replica import fetcher as fetcher_module
from xinference_xavier.replica import neighbours as module
from xinference_xavier.replica.canary import Audited
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.donor import Donor
from xinference_xavier.replica.fetcher import Fetch, FetchState
from xinference_xavier.replica.hot_chunks import copy_rows
from xinference_xavier.replica.neighbours import Neighbours
from xinference_xavier.runtime.aio import UNREACHABLE

ROWS, ROW_BYTES = 8, 4096


class Replica(Consumer):
    """Its one worker has the engine's window. It fetches from `source`."""

    def __init__(self, host: AsyncExitStack, rows: int = ROWS, row_bytes: int = ROW_BYTES) -> None:
        self.name = uuid.uuid4().hex
        region, pool = Region.create(rows, row_bytes), Pool(rows)
        super().__init__(region, pool, compared_index(self.name), self._pull)
        self.peers = self.index.members
        window = self.neighbours.window
        self.neighbours = Neighbours(window, self.peers, workers=1, enabled=True)
        self.fetcher._neighbours = self.neighbours
        self.fetcher._canary = SimpleNamespace(take=self._take)  # type: ignore[assignment]
        self.failed: list[Audited] = []
        self._process: Any = SimpleNamespace(endpoint=Endpoint("host:1"), ready=True)
        self.donor = Donor(
            pool,
            self.peers,
            NoDisk(),
            self._process,
            self.namespace,
            self.publisher,
            deque(),
            NEVER,
        )
        self.releases_arrive = asyncio.Event()
        self.releases_arrive.set()
        self._open = host
        self.start_worker()
        host.callback(lambda: self.stop_worker())
        served = serve_region(region, self.name)
        host.callback(served.close)

    def start_worker(self) -> None:
        size = slice(0, self.region.row_bytes)
        self.stop_worker = WindowServer(self.neighbours.window, self.name, 0, size, None).close

    async def open(self) -> None:
        self._lending = await self.donor.lending.open(self.donor.grants.borrower_ended)
        self._open.callback(self._lending.close)

    def end(self) -> None:
        """Close what its process has open."""
        self._lending.close()
        for connection in self.donor.lending.borrowers.values():
            connection.close()

    async def _pull(self, _: object) -> Any:
        raise AssertionError("a neighbour needs no link")

    def _take(self, result: Audited) -> None:
        self.failed.append(result)

    def meet(self, *others: "Replica", **holdings: Sequence[bytes]) -> None:
        self.index.apply(snapshot(*(compared(each.name) for each in others), **holdings))
        for each in others:
            actor: Any = SimpleNamespace(grant=each.grant, release=each.release)
            self.peers[each.name].actor = actor
            self.source = each.name

    async def grant(self, request: GrantRequest) -> Grant:
        return self.donor.grant(request)

    async def release(self, consumer: str, number: int) -> None:
        if not self.releases_arrive.is_set():
            raise UNREACHABLE[0]
        self.donor.grants.release(consumer, number)

    def borrow(self, keys: Sequence[bytes]) -> tuple[Fetch, asyncio.Future[None]]:
        fetch = Fetch(self.source, self.pool.borrow(keys), 1e9)
        return fetch, self.fetcher.start(fetch)

    def row(self, row: Row) -> bytes:
        return bytes(self.neighbours.window.array[row.slot])

    @property
    def neighbour(self) -> bool:
        return self.peers[self.source].is_neighbour


class Pair:
    """A donor and a consumer, which know each other."""

    def __init__(self, host: AsyncExitStack) -> None:
        self.donor, self.consumer = Replica(host), Replica(host)
        self.keys = fresh_keys(4)

    async def open(self) -> None:
        for each in (self.donor, self.consumer):
            await each.open()
        fill(self.donor.region, self.donor.pool, self.keys)
        self.donor.meet(self.consumer)
        self.consumer.meet(self.donor, **{self.donor.name: self.keys})

    async def until(self, condition: Callable[[], bool]) -> None:
        """While neighbours look after each other."""
        await self.consumer.neighbours._look()
        async with asyncio.timeout(NEVER):
            while not condition():  # the kernel tells a socket, and nobody else
                await asyncio.sleep(0.001)
                await self.consumer.neighbours._look()

    @property
    def pinned(self) -> int:
        return self.donor.pool.counts().pinned


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(fetcher_module, "LOAN_LOOK", 0.001)
    async with AsyncExitStack() as host:
        pair = Pair(host)
        await pair.open()
        yield pair


async def test_a_peer_of_this_host_becomes_a_neighbour(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    assert pair.consumer.peers.neighbours == pair.consumer.peers.usable
    assert pair.consumer.neighbours.mapped_bytes == ROWS * ROW_BYTES


async def test_a_peer_elsewhere_is_tried_once_and_then_known_to_be_none(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = uuid.uuid4().hex
    pair.consumer.index.apply(snapshot(compared(far)))
    assert not pair.consumer.neighbours.is_settled(far)
    await pair.consumer.neighbours._look()
    assert pair.consumer.neighbours.is_settled(far)
    monkeypatch.setattr(module, "_connect", None)
    await pair.consumer.neighbours._look()
    assert not pair.consumer.peers[far].is_neighbour
    reason = "not on this host, or in another network namespace"
    assert pair.consumer.neighbours.obstacles == {far: reason}


async def test_rows_are_lent_where_they_are(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    assert (fetch.state, fetch.transport) == (FetchState.COMMITTED, "in_place")
    assert [pair.consumer.row(row) for row in fetch.rows] == [
        content(key, ROW_BYTES).tobytes() for key in pair.keys
    ]
    assert pair.consumer.pool.counts().ready == 0
    assert pair.consumer.arrived == [], "peers find them at the donor"


async def test_rows_are_pinned_until_nobody_has_them_any_more(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    loading = pair.consumer.pool.pin(pair.keys[:1])
    pair.consumer.pool.unpin(fetch.committed)
    await asyncio.sleep(0.01)
    assert pair.pinned == 4
    pair.consumer.pool.unpin(loading)
    await pair.until(lambda: pair.pinned == 0)


async def test_a_release_that_does_not_arrive_is_repeated(pair: Pair) -> None:
    """Nothing else would end the grant."""
    await pair.until(lambda: pair.consumer.neighbour)
    pair.donor.releases_arrive.clear()
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    pair.consumer.pool.unpin(fetch.committed)
    await pair.until(lambda: not pair.consumer.pool.held)
    assert pair.pinned == 4
    pair.donor.releases_arrive.set()
    await pair.until(lambda: pair.pinned == 0)


async def test_a_peer_that_is_looked_for_again_meanwhile_gets_its_release(pair: Pair) -> None:
    """Another call to it has failed."""
    await pair.until(lambda: pair.consumer.neighbour)
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    pair.consumer.peers[pair.donor.name].actor = None
    pair.consumer.pool.unpin(fetch.committed)
    await pair.until(lambda: pair.pinned == 0)


async def test_a_pool_that_a_worker_has_not_unmapped_yet_is_remembered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would not be free."""
    await pair.until(lambda: pair.consumer.neighbour)
    obeyed, refusals = pair.consumer.neighbours._obeyed, [TimeoutError(), OSError()]

    async def obey(rank: int, order: Order) -> None:
        if refusals:
            raise refusals.pop()
        await obeyed(rank, order)

    monkeypatch.setattr(pair.consumer.neighbours, "_obeyed", obey)
    pair.donor.end()
    await pair.until(lambda: len(refusals) == 1)
    assert pair.consumer.neighbours.mapped_bytes
    await pair.until(lambda: not pair.consumer.neighbours.mapped_bytes)
    assert not refusals


async def test_a_row_that_cannot_be_verified_is_released_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    monkeypatch.setattr(pair.consumer.neighbours, "checksum", None)
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    pair.consumer.pool.unpin(fetch.committed)
    await pair.until(lambda: pair.pinned == 0)


async def test_what_a_consumer_has_is_free_once_its_process_has_ended(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    _, ended = pair.consumer.borrow(pair.keys)
    await ended
    neighbour = pair.consumer.neighbours.get(pair.donor.name)
    assert neighbour is not None
    assert pair.pinned == 4
    neighbour.connection.close()
    async with asyncio.timeout(NEVER):
        while pair.pinned:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_donor_that_has_ended_stays_mapped_while_its_rows_are_loaded(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    pair.donor.end()
    await pair.until(lambda: not pair.consumer.neighbour)
    assert pair.consumer.neighbours.mapped_bytes
    assert pair.consumer.row(fetch.rows[3]) == content(pair.keys[3], ROW_BYTES).tobytes()
    pair.consumer.pool.unpin(fetch.committed)
    await pair.until(lambda: not pair.consumer.neighbours.mapped_bytes)


async def test_a_peer_that_is_forgotten_and_comes_back_is_a_neighbour_still(pair: Pair) -> None:
    """New weights do that. To map it anew would take seconds for each GiB."""
    await pair.until(lambda: pair.consumer.neighbour)
    mapped = pair.consumer.neighbours.get(pair.donor.name)
    pair.consumer.index.clear()
    pair.consumer.peers.set_compared(True)
    pair.consumer.meet(pair.donor)
    assert not pair.consumer.neighbour
    await pair.until(lambda: pair.consumer.neighbour)
    assert pair.consumer.neighbours.get(pair.donor.name) is mapped


async def test_the_room_of_one_that_has_ended_is_used_again(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    async with AsyncExitStack() as host:
        second, third = Replica(host), Replica(host, rows=ROWS // 2)
        firsts = []
        for each in (second, third):
            await each.open()
            pair.consumer.meet(pair.donor, each)
            await pair.until(lambda: pair.consumer.neighbour)
            firsts.append(pair.consumer.peers[each.name].first_row)
            pair.donor.end()
            await pair.until(lambda: not pair.consumer.peers[pair.donor.name].is_neighbour)
        assert firsts == [2 * ROWS, ROWS]


async def test_rows_of_another_size_are_not_mapped(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as host:
        other = Replica(host, row_bytes=2 * ROW_BYTES)
        await other.open()
        pair.consumer.meet(other)
        await pair.consumer.neighbours._look()
        assert not pair.consumer.neighbour
        assert "its rows have 8192 bytes, the own ones 4096" in caplog.text


async def test_nothing_is_loaded_that_the_workers_have_mapped_no_longer(pair: Pair) -> None:
    """The scheduler may begin a fetch at the same moment."""
    await pair.until(lambda: pair.consumer.neighbour)
    neighbour = pair.consumer.neighbours.get(pair.donor.name)
    assert neighbour is not None
    neighbour.in_place = False
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    assert (fetch.reason, fetch.committed) == ("donor gone", [])
    await pair.until(lambda: pair.pinned == 0)


async def test_a_reset_meanwhile_voids_what_is_lent(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    fetch, ended = pair.consumer.borrow(pair.keys)
    pair.consumer.pool.reset()
    await ended
    assert (fetch.state, fetch.reason) == (FetchState.ROLLED_BACK, "reset")
    assert pair.consumer.pool.counts().quarantined == 0
    await pair.until(lambda: pair.pinned == 0)


async def test_rows_of_a_donor_that_computes_something_else_are_not_loaded(pair: Pair) -> None:
    await pair.until(lambda: pair.consumer.neighbour)
    pair.consumer.peers.set_compared(False)
    fetch, ended = pair.consumer.borrow(pair.keys)
    await ended
    assert fetch.reason == "not compared"
    await pair.until(lambda: pair.pinned == 0)


async def test_a_row_that_is_not_what_was_granted_is_like_a_failed_audit(pair: Pair) -> None:
    """Each fetch has one of its rows verified, after it is a hit."""
    await pair.until(lambda: pair.consumer.neighbour)
    pair.donor.region.array[:, 7] ^= 1
    _, ended = pair.consumer.borrow(pair.keys)
    await ended
    await pair.until(lambda: bool(pair.consumer.failed))
    (failed,) = pair.consumer.failed
    assert failed.donor == pair.donor.name
    assert str(failed.difference).startswith("a checksum")


# -- what is copied ---------------------------------------------------------------------------


@pytest.fixture
async def copying(pair: Pair) -> Pair:
    """The consumer's worker takes no orders."""
    pair.consumer.stop_worker()
    pair.consumer.stop_worker = lambda: None
    await pair.consumer.neighbours._look()
    return pair


async def test_rows_that_only_the_engine_has_mapped_are_copied(copying: Pair) -> None:
    consumer, donor = copying.consumer, copying.donor.name
    assert not consumer.neighbour
    assert consumer.neighbours.linked_to == {donor: "shared_memory"}
    assert consumer.neighbours.mapped_bytes == 0
    assert consumer.neighbours.obstacles == {donor: "a worker takes no orders"}
    fetch = await consumer.fetch(copying.keys)
    assert (fetch.state, fetch.transport) == (FetchState.COMMITTED, "shared_memory")
    assert consumer.holds(copying.keys)
    assert consumer.arrived == copying.keys
    await copying.until(lambda: copying.pinned == 0)


async def test_workers_are_asked_again_after_a_while(
    copying: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = copying.consumer
    consumer.start_worker()
    await consumer.neighbours._look()
    assert not consumer.neighbour
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e9)
    await consumer.neighbours._look()
    assert consumer.neighbour
    assert consumer.neighbours.obstacles == {}
    assert consumer.neighbours.linked_to == {copying.donor.name: "in_place"}


async def test_a_hand_over_is_copied_though_the_donor_lends(pair: Pair) -> None:
    """Its rows will be gone."""
    await pair.until(lambda: pair.consumer.neighbour)
    deadline = time.monotonic() + NEVER
    assert await copy_rows(pair.consumer.fetcher, pair.donor.name, pair.keys, deadline) == 4
    assert pair.consumer.holds(pair.keys)


async def test_no_slot_outside_of_the_donors_pool_is_read(
    copying: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = copying.donor.donor.grant
    monkeypatch.setattr(
        copying.donor.donor, "grant", lambda request: grant(request)._replace(slots=(0, 1, 2, ROWS))
    )
    fetch = await copying.consumer.fetch(copying.keys)
    assert (fetch.reason, fetch.committed) == ("donor unreachable", [])


async def test_a_copy_ends_by_its_deadline(copying: Pair) -> None:
    consumer = copying.consumer
    neighbour = consumer.neighbours.get(copying.donor.name)
    assert neighbour is not None
    rows = consumer.pool.reserve(copying.keys).rows
    late = consumer.neighbours.copy(neighbour, rows, range(4), range(4), time.monotonic() - 1)
    assert await late == PullResult(0, "timeout", "shared_memory")
    assert not consumer.region.array.any()


async def test_a_donor_that_has_ended_stays_mapped_while_its_rows_are_copied(
    copying: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, copyto = threading.Event(), threading.Event(), np.copyto

    def copy(*rows: Any) -> None:
        begun.set()
        go_on.wait(NEVER)
        copyto(*rows)

    monkeypatch.setattr(np, "copyto", copy)
    consumer = copying.consumer
    _, ended = consumer.begin(copying.keys)
    await copying.until(begun.is_set)
    copying.donor.end()
    neighbour = consumer.neighbours.get(copying.donor.name)
    assert neighbour is not None
    await copying.until(lambda: neighbour.is_gone)
    await consumer.neighbours._look()
    assert consumer.neighbours.get(copying.donor.name) is neighbour
    go_on.set()
    await ended
    assert consumer.holds(copying.keys)
    await copying.until(lambda: consumer.neighbours.get(copying.donor.name) is None)


async def test_a_peer_that_runs_as_another_user_is_told_apart(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    await pair.consumer.neighbours._look()
    (reason,) = pair.consumer.neighbours.obstacles.values()
    assert "not as 4242; run all replicas of a host as one user" in reason
    assert pair.consumer.neighbours.linked_to == {}

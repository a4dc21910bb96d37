"""A fetch brings whole rows or leaves no trace, whatever they come from: a peer over any transport,
a neighbour's memory, or the disk. What only the disk does is in `test_disk.py`, what only links do
in `transfer/`."""

import asyncio
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import faults
from tests.harness.comparisons import compared, compared_index, snapshot
from tests.harness.replicas import fresh_keys
from tests.replica.consumers import NEVER, Consumer, Life, file_of, fill, life
from tests.transfer import sides as actors
from tests.transfer.sides import KINDS, Kind, Sides
from xinference_xavier.disk_store import Store
from xinference_xavier.peers import DISK, SHARED_MEMORY
from xinference_xavier.pool.pool import Pool, flush
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.donor import Donor
from xinference_xavier.replica.fetcher import Fetch, FetchState
from xinference_xavier.replica.hot_chunks import copy_rows
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.neighbours import Neighbour
from xinference_xavier.replica.reports import Publisher

SOON = 0.2


class Gate:
    """Whoever reads a row passes it."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self.open()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        self.reached.clear()

    def wait(self) -> None:
        self.reached.set()
        self._open.wait()


class Source:
    """What `consumer` fetches from, through a `gate`."""

    def __init__(self, consumer: Consumer, gate: Gate) -> None:
        self.consumer = consumer
        self.gate = gate

    @abstractmethod
    async def keep(self, keys: Sequence[bytes]) -> None:
        """Hold these chunks, which the consumer does not hold."""

    @abstractmethod
    def damage(self, key: bytes, by: bytes | None) -> None:
        """Have the row of `by` in its place; without one, flip a bit."""

    @abstractmethod
    def lose(self, key: bytes) -> None:
        """Without a word to the consumer."""


class SavedRows(Source):
    def __init__(self, consumer: Life, folder: Path, gate: Gate) -> None:
        super().__init__(consumer, gate)
        self._keep = consumer.have_on_disk
        self._folder = folder

    async def keep(self, keys: Sequence[bytes]) -> None:
        await self._keep(keys)

    def damage(self, key: bytes, by: bytes | None) -> None:
        whole = bytearray(self._file(by or key).read_bytes())
        whole[-100] ^= by is None
        self._file(key).write_bytes(whole)

    def lose(self, key: bytes) -> None:
        self._file(key).unlink()

    def _file(self, key: bytes) -> Path:
        return file_of(self._folder, key)


class FromPeer(Consumer):
    source = "donor"


class PeersRows(Source):
    """A donor and its consumer, whose pools are in these regions."""

    def __init__(
        self, donor: Region, consumer: Region, gate: Gate, endpoint: Endpoint, pull: Any = None
    ) -> None:
        index = compared_index("consumer")
        pool = Pool(actors.ROWS)
        super().__init__(FromPeer(consumer, pool, index, pull), gate)
        self._region, self._pool = donor, Pool(actors.ROWS)
        peers = compared_index("donor")
        peers.apply(snapshot(compared("consumer")))
        process: Any = SimpleNamespace(endpoint=endpoint, ready=True)
        publisher = Publisher("donor", self._pool)
        publisher.last_sequence = 1  # as in its snapshot
        self._donor = Donor(
            self._pool,
            peers.members,
            NoDisk(),
            process,
            SharedNamespace("namespace", peers, NoDisk()),
            publisher,
            deque(),
            NEVER,
        )

    async def keep(self, keys: Sequence[bytes]) -> None:
        fill(self._region, self._pool, keys)
        index = self.consumer.index
        index.apply(snapshot(compared("donor"), donor=keys))
        index.members["donor"].actor = SimpleNamespace(grant=self._grant, release=self._release)

    async def _grant(self, request: GrantRequest) -> Grant:
        return self._donor.grant(request)

    async def _release(self, consumer: str, number: int) -> None:
        self._donor.grants.release(consumer, number)

    def damage(self, key: bytes, by: bytes | None) -> None:
        row, other = (self._region.row(self._slot(each)) for each in (key, by or key))
        row[:] = other
        row[-1] ^= by is None

    def lose(self, key: bytes) -> None:
        flush(self._pool, lambda row: row.key == key)

    def _slot(self, key: bytes) -> int:
        row = self._pool.lookup(key)
        assert row is not None
        return row.slot


def neighbours_rows(gate: Gate) -> PeersRows:
    """The consumer's engine has mapped the donor's pool, and no worker has."""
    donor, own = (Region.create(actors.ROWS, actors.ROW_BYTES) for _ in range(2))
    source = PeersRows(donor, own, gate, Endpoint("host:1"))
    neighbours, (connection, _) = source.consumer.neighbours, socket.socketpair()
    neighbours.window.map(own.rows, donor)
    neighbours._mapped["donor"] = Neighbour("donor", own.rows, donor.rows, connection)
    return source


@pytest.fixture(params=[DISK, SHARED_MEMORY, *KINDS])
async def source(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Source]:
    gate = Gate()
    if request.param == DISK:
        read = Store.read

        def wait(store: Store, *row: Any) -> int:
            gate.wait()
            return read(store, *row)

        monkeypatch.setattr(Store, "read", wait)
        async with life(tmp_path) as replica:
            yield SavedRows(replica, tmp_path, gate)
            gate.open()
        return

    if request.param == SHARED_MEMORY:
        copyto = np.copyto

        def copy(*rows: Any) -> None:
            gate.wait()
            copyto(*rows)

        monkeypatch.setattr(np, "copyto", copy)
        yield neighbours_rows(gate)
        gate.open()
        return

    class Waiting(faults._FaultyLink):
        def receive(self, *batch: Any) -> Iterator[int]:
            gate.wait()
            return self.link.receive(*batch)

        def close(self) -> None:
            gate.wait()  # until then, rows are written
            self.link.close()

    kind: Kind = KINDS[request.param]
    async with Sides(kind) as sides:
        donor = await sides.start("donor")
        consumer = await sides.start("consumer", kind.with_link(Waiting))
        yield PeersRows(donor.region, consumer.region, gate, donor.endpoint, consumer.actor.pull)
        gate.open()


@pytest.fixture
def consumer(source: Source) -> Consumer:
    return source.consumer


def is_idle(consumer: Consumer) -> bool:
    """True if no slot is being written."""
    counts = consumer.pool.counts()
    return counts.filling == counts.quarantined == 0


def outcome(fetch: Fetch) -> tuple[str | None, int]:
    """Why it was rolled back, and how many rows were committed."""
    assert (fetch.reason is None) == (fetch.state is FetchState.COMMITTED)
    return fetch.reason, len(fetch.committed)


async def test_rows_arrive_byte_for_byte(source: Source, consumer: Consumer) -> None:
    """And peers are offered them."""
    keys, others = fresh_keys(4), fresh_keys(2)
    await source.keep([*others, *keys])
    assert outcome(await consumer.fetch(keys)) == (None, 4)
    assert consumer.holds(keys)
    assert consumer.arrived == keys
    assert not any(map(consumer.pool.lookup, others))
    assert consumer.pool.counts().pinned == 4, "until the engine has used them"
    counts = consumer.fetcher.counts
    ((transport, figures),) = counts.fetches.by_transport.items()
    assert (transport == DISK) is (consumer.source == DISK)
    assert figures.bytes == 4 * consumer.region.row_bytes
    received = [peer.received for peer in consumer.index.members.values()]
    assert received == ([] if transport == DISK else [4])
    assert (counts.rows, counts.in_flight) == (sum(received), {})


async def test_fetches_at_the_same_time_all_arrive(source: Source, consumer: Consumer) -> None:
    keys = fresh_keys(4)
    await source.keep(keys)
    fetches = await asyncio.gather(consumer.fetch(keys[:2]), consumer.fetch(keys[2:]))
    assert [outcome(fetch) for fetch in fetches] == [(None, 2)] * 2
    assert consumer.holds(keys)


@pytest.mark.parametrize("swapped", [False, True], ids=["changed", "swapped"])
async def test_a_wrong_row_ends_the_fetch_before_it(
    source: Source, consumer: Consumer, swapped: bool
) -> None:
    """Another chunk's whole row is wrong, too."""
    keys = fresh_keys(4)
    await source.keep(keys)
    source.damage(keys[2], by=keys[0] if swapped else None)
    assert outcome(await consumer.fetch(keys)) == ("checksum", 2)
    assert consumer.holds(keys[:2])
    assert not any(map(consumer.pool.lookup, keys[2:]))
    assert consumer.arrived == keys[:2]
    assert is_idle(consumer)


async def test_what_the_source_has_lost_is_not_held(source: Source, consumer: Consumer) -> None:
    """Rows before it count. It is not looked for until it is there again."""
    before, lost, behind = keys = fresh_keys(3)
    await source.keep(keys)
    source.lose(lost)
    committed = (await consumer.fetch(keys)).committed
    assert [row.key for row in committed] == [before]
    consumer.pool.unpin(committed)
    assert [holders(consumer, key) for key in (lost, behind)] == [[], [consumer.source]]
    assert outcome(await consumer.fetch([lost])) == ("not held", 0)
    assert is_idle(consumer)
    await source.keep([lost])
    assert outcome(await consumer.fetch([lost, behind])) == (None, 2)
    assert consumer.holds([lost, behind])


def holders(consumer: Consumer, key: bytes) -> list[str]:
    return consumer.tier.peers.names(consumer.tier.holders(key))


@pytest.mark.parametrize("source", ["gloo"], indirect=True)
async def test_a_donor_grants_at_most_half_of_its_pool_and_the_rest_is_not_stale(
    source: Source, consumer: Consumer
) -> None:
    keys = fresh_keys(actors.ROWS // 2 + 3)
    await source.keep(keys)
    assert outcome(await consumer.fetch(keys)) == (None, actors.ROWS // 2)
    assert all(holders(consumer, key) == ["donor"] for key in keys)


async def test_a_source_that_hangs_costs_the_deadline_and_writes_to_no_reused_slot(
    source: Source, consumer: Consumer
) -> None:
    first, *keys = fresh_keys(3)
    await source.keep([first, *keys])
    await consumer.fetch([first])  # this opens a link
    source.gate.close()
    fetch, fetching = consumer.begin(keys, SOON)
    assert consumer.fetcher.counts.in_flight == {consumer.source: 2}
    await consumer.until(fetch.ended.is_set)
    assert outcome(fetch) == ("timeout", 0)
    others = fresh_keys(consumer.pool.slots)
    fill(consumer.region, consumer.pool, others)
    assert consumer.pool.counts().quarantined == 2
    source.gate.open()
    await fetching
    assert is_idle(consumer)
    assert consumer.holds([key for key in others if consumer.pool.lookup(key)])
    assert outcome(await consumer.fetch(keys)) == (None, 2), "it is used again"


async def test_rows_are_not_free_while_they_are_read_though_sharing_has_ended(
    source: Source, consumer: Consumer
) -> None:
    """The engine may go on without its replica."""
    keys = fresh_keys(2)
    await source.keep(keys)
    source.gate.close()
    _, fetching = consumer.begin(keys)
    await consumer.until(source.gate.reached.is_set)
    fetching.cancel()
    await asyncio.sleep(SOON)
    filling = consumer.pool.counts().filling
    source.gate.open()
    assert filling == 2
    await asyncio.wait({fetching})
    assert is_idle(consumer)
    assert not any(map(consumer.pool.lookup, keys))


async def test_rows_are_not_free_while_they_are_read_for_somebody_who_has_given_up(
    source: Source, consumer: Consumer
) -> None:
    keys = fresh_keys(2)
    await source.keep(keys)
    source.gate.close()
    copies = copy_rows(consumer.fetcher, consumer.source, keys, time.monotonic() + NEVER)
    copying = asyncio.ensure_future(copies)
    await consumer.until(source.gate.reached.is_set)
    copying.cancel()
    await asyncio.wait({copying})
    await asyncio.sleep(SOON)  # what is cancelled with it ends now
    filling = consumer.pool.counts().filling
    source.gate.open()
    assert filling == 2
    await consumer.until(lambda: consumer.holds(keys) and consumer.pool.counts().pinned == 0)


async def test_what_arrives_after_a_reset_is_not_used(source: Source, consumer: Consumer) -> None:
    keys = fresh_keys(2)
    await source.keep(keys)
    source.gate.close()
    fetch, fetching = consumer.begin(keys)
    await consumer.until(source.gate.reached.is_set)
    consumer.pool.reset()
    source.gate.open()
    await fetching
    assert outcome(fetch) == ("reset", 0)
    assert consumer.arrived == []
    assert consumer.pool.counts() == (consumer.pool.slots, 0, 0, 0, 0)

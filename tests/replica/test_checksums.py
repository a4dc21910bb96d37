"""Stored rows get their checksums and are offered off the scheduler thread, however fast they
come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.replica.donor import Checksums

SLOTS = 4
PATIENCE = 30.0


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create(SLOTS, 4096)
    yield region
    region.close()


@pytest.fixture
def pool() -> Pool:
    return Pool(SLOTS)


class Offers:
    """Collects the offered keys, and announces each offer."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.changed = asyncio.Event()

    def __call__(self, keys: list[bytes]) -> None:
        self.keys += keys
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.keys) < count:
                await self.changed.wait()
                self.changed.clear()


@pytest.fixture
async def offers() -> Offers:
    return Offers()


@pytest.fixture
async def checksums(region: Region, pool: Pool, offers: Offers) -> AsyncIterator[Checksums]:
    checksums = Checksums(region, pool, offers)
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
    checksums: Checksums, region: Region, pool: Pool, offers: Offers
) -> None:
    rows = store(pool, b"one", b"two")
    region.row(rows[0].slot)[:] = 7
    checksums.add(rows)
    await offers.until(2)
    assert offers.keys == [b"one", b"two"]
    assert [row.checksum for row in rows] == [region.checksum(r.slot, r.key) for r in rows]
    assert pool.counts().pinned == 0
    checksums.add(store(pool, b"three"))
    await offers.until(3)


async def test_rows_evicted_meanwhile_are_not_offered(
    checksums: Checksums, pool: Pool, offers: Offers
) -> None:
    gone = store(pool, b"gone")
    pool.reset()
    checksums.add([*gone, *store(pool, b"here")])
    await offers.until(1)
    assert offers.keys == [b"here"]


async def test_at_most_one_row_per_slot_waits(
    checksums: Checksums,
    region: Region,
    pool: Pool,
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
    checksums.add(store(pool, b"first"))
    await asyncio.to_thread(at_work.wait, PATIENCE)
    for number in range(100):
        checksums.add(store(pool, b"%d" % number))
    assert len(checksums._waiting) <= SLOTS
    proceed.set()
    await offers.until(SLOTS)
    assert set(offers.keys) == {b"first", b"97", b"98", b"99"}
    assert (pool.counts().pinned, len(checksums._waiting)) == (0, 0)

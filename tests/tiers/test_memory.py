"""The memory tier loads evicted chunks, and a manager needs no more than the tier's contract."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.v1.kv_offload.base import OffloadKey

from tests.engine.scheduling import CHUNK, FETCH_TIMEOUT, ROW_BYTES, Clock, Scheduling, chunks
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import Region
from xinference_xavier.tiers.base import FetchState
from xinference_xavier.tiers.memory import SOURCE, MemoryTier

SLOTS = 4
LATER = 1e9


@pytest.fixture
def pool() -> Pool:
    return Pool(SLOTS)


@pytest.fixture
def region() -> Region:
    return Region.create(SLOTS, 4096)


@pytest.fixture
def tier(pool: Pool, region: Region) -> MemoryTier:
    return MemoryTier(pool, region, max_chunks=8)


def store(pool: Pool, region: Region, tier: MemoryTier, keys: list[bytes]) -> None:
    for number, row in enumerate(pool.reserve(keys).rows):
        region.row(row.slot)[:] = number + 1
        assert pool.commit(row)
        tier.on_stored([row])


def test_evicted_chunks_are_loaded_byte_for_byte(
    pool: Pool, region: Region, tier: MemoryTier
) -> None:
    store(pool, region, tier, [b"a", b"b"])
    pool.reset()
    fetch = tier.submit_load(SOURCE, pool.reserve([b"b", b"a"]).rows, LATER)
    assert fetch is not None
    assert (fetch.state, fetch.reason) == (FetchState.COMMITTED, None)
    assert [set(region.row(row.slot)) for row in fetch.rows] == [{np.uint8(2)}, {np.uint8(1)}]
    assert [row.pins for row in fetch.committed] == [1, 1]
    assert fetch.ended.is_set()


def test_a_chunk_that_is_not_held_ends_the_run(
    pool: Pool, region: Region, tier: MemoryTier
) -> None:
    store(pool, region, tier, [b"a", b"c"])
    pool.reset()
    assert [tier.holders(key) for key in (b"a", b"b")] == [1, 0]
    assert tier.run([b"a", b"c", b"b"], -1) == (2, 1)
    assert tier.run([b"b", b"a"], -1) == (0, -1)
    assert [tier.sources(holders) for holders in (1, 0)] == [[SOURCE], []]
    assert tier.set_of(["stranger", SOURCE]) == 1
    fetch = tier.submit_load(SOURCE, pool.reserve([b"a", b"b", b"c"]).rows, LATER)
    assert fetch is not None
    assert (fetch.state, fetch.reason) == (FetchState.ROLLED_BACK, "not held")
    assert [row.key for row in fetch.committed] == [b"a"]
    assert pool.counts().filling == 0, "the other rows are free again"


def test_the_latest_stored_chunks_are_kept(pool: Pool, region: Region) -> None:
    tier = MemoryTier(pool, region, max_chunks=2)
    store(pool, region, tier, [b"a", b"b", b"c"])
    assert [key for key in (b"a", b"b", b"c") if tier.holders(key)] == [b"b", b"c"]


def test_a_closed_tier_loads_nothing(pool: Pool, region: Region, tier: MemoryTier) -> None:
    store(pool, region, tier, [b"a"])
    tier.close()
    assert not tier.ready
    pool.reset()
    assert tier.submit_load(SOURCE, pool.reserve([b"a"]).rows, LATER) is None
    assert pool.counts().filling == 0


def test_a_reset_forgets_all_chunks(pool: Pool, region: Region, tier: MemoryTier) -> None:
    store(pool, region, tier, [b"a"])
    tier.reset()
    assert not tier.holders(b"a")
    assert pool.counts().ready == 0


class _OnMemory(Scheduling):
    """vLLM's scheduler over a manager whose only tier is memory."""

    def __init__(self) -> None:
        self.pool = Pool(SLOTS)
        self.clock = Clock()
        region = Region.create(SLOTS, 4096)
        self.manager = XavierManager(
            self.pool,
            MemoryTier(self.pool, region, max_chunks=64),
            chunk_tokens=CHUNK,
            row_bytes=ROW_BYTES,
            min_fetch_tokens=0,
            adaptive=False,
            fetch_timeout=FETCH_TIMEOUT,
            clock=self.clock,
        )

    def hits(self, keys: list[OffloadKey]) -> int | None:
        """The hits of a request for these chunks."""
        request = self.arrive("again", keys)
        while (hits := self.attempt(request)) is None:
            pass
        return hits


def test_a_manager_needs_nothing_but_the_contract() -> None:
    vllm = _OnMemory()
    first, other = chunks("first", SLOTS), chunks("other", SLOTS)
    vllm.fill(first)
    vllm.fill(other)  # evicts the first
    assert vllm.hits(first) == SLOTS

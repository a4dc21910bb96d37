"""After a reset no slot is reused while a job from before may still write or read it."""

from __future__ import annotations

from tests.engine.scheduling import Scheduling, assert_nothing_left, chunks
from xinference_xavier.engine.jobs import Jobs
from xinference_xavier.pool.pool import Pool, PoolCounts


def test_rows_of_old_jobs_are_quarantined_until_a_later_job_ends(vllm: Scheduling) -> None:
    stored = chunks("stored", 3)
    vllm.fill(chunks("loaded", 4))
    loading = vllm.arrive("l", chunks("loaded", 4))
    vllm.scan(loading)
    vllm.schedule(loading, 4)
    storing = vllm.arrive("s", stored)
    vllm.begin_store(storing, stored)

    vllm.manager.reset_cache()
    assert vllm.pool.counts() == PoolCounts(rows=32, ready=0, filling=0, pinned=4, quarantined=7)

    assert vllm.begin_store(storing, stored) == [], "they are of before the reset"
    vllm.manager.begin_lookups(storing.req_id, 0)
    begun = vllm.begin_store(storing, stored)
    assert vllm.pool.counts().quarantined == 7
    vllm.stored(storing, begun)
    assert vllm.pool.counts().ready == 3
    assert_nothing_left(vllm)


def test_rows_of_old_jobs_are_free_when_vllm_reports_their_end(vllm: Scheduling) -> None:
    """vLLM 0.33 and later report it."""
    storing = vllm.arrive("s", chunks("stored", 3))
    vllm.begin_store(storing, storing.keys)
    vllm.manager.reset_cache()
    vllm.manager.on_reset_flushed()
    assert_nothing_left(vllm)


def test_a_store_that_a_reset_overtook_leaves_no_row() -> None:
    pool = Pool(2)
    jobs = Jobs(pool)
    jobs.begin_store("r", [(row.key, row) for row in pool.reserve([b"a", b"b"]).rows])
    assert jobs
    pool.reset()
    assert jobs.end_store("r", [b"a", b"b"], success=True) == []
    assert not jobs
    assert pool.lookup(b"a") is None


def test_a_void_store_frees_its_rows(vllm: Scheduling) -> None:
    """vLLM's workers would write wrong bytes into them."""
    storing = vllm.arrive("s", chunks("stored", 3))
    begun = vllm.begin_store(storing, storing.keys)
    vllm.manager.void_store(storing.req_id, begun)
    vllm.stored(storing, begun)
    assert vllm.tier.stored_rows == []
    assert_nothing_left(vllm)
    vllm.stored(storing, vllm.begin_store(storing, storing.keys))
    assert len(vllm.tier.stored_rows) == 3

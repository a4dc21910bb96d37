"""What is stored in the pool, what leaves it first, and what a reset takes."""

from __future__ import annotations

from vllm.v1.kv_offload.base import OffloadKey

from tests.engine.scheduling import Scheduling, assert_nothing_left, chunks, waiting
from xinference_xavier.pool.pool import PoolCounts


class TestStore:
    def test_is_offered_to_peers_once_it_is_complete(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 4)
        request = vllm.arrive("r", keys)
        begun = vllm.begin_store(request, keys)
        assert (begun, vllm.replica.stored_rows) == (keys, [])
        vllm.stored(request, begun)
        assert {row.key for row in vllm.replica.stored_rows} == set(keys)

    def test_that_failed_never_was(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 4)
        request = vllm.arrive("r", keys)
        vllm.manager.complete_store(vllm.begin_store(request, keys), request.context, success=False)
        assert vllm.replica.stored_rows == []
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_leaves_out_what_is_held_or_on_its_way(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.fill(keys[:2])
        first, second = vllm.arrive("r", keys), vllm.arrive("s", keys)
        assert vllm.begin_store(first, keys[:4]) == keys[2:4]
        assert vllm.begin_store(second, keys) == keys[4:]

    def test_drops_from_the_tail_what_does_not_fit(self) -> None:
        vllm = Scheduling(slots=4)
        keys = chunks("prompt", 6)
        request = vllm.arrive("r", keys)
        assert vllm.begin_store(request, keys) == keys[:4]

    def test_never_drives_out_its_own_prefix(self) -> None:
        vllm = Scheduling(slots=6)
        keys = chunks("prompt", 10)
        vllm.fill(keys[:4])
        vllm.fill(chunks("other", 2))
        request = vllm.arrive("r", keys)
        assert vllm.begin_store(request, keys[4:]) == keys[4:6]
        assert sorted(vllm.replica.evicted_keys) == sorted(chunks("other", 2))

    def test_drives_out_the_least_recently_used_and_says_so(self) -> None:
        vllm = Scheduling(slots=6)
        for name in ("old", "new"):
            vllm.fill(chunks(name, 3))
        request = vllm.arrive("r", chunks("prompt", 3))
        vllm.begin_store(request, request.keys)
        assert sorted(vllm.replica.evicted_keys) == sorted(chunks("old", 3))

    def test_may_be_complete_after_its_request(self, vllm: Scheduling) -> None:
        request = vllm.arrive("r", chunks("prompt", 4))
        begun = vllm.begin_store(request, request.keys)
        vllm.finish(request)
        vllm.stored(request, begun)
        assert_nothing_left(vllm)


class TestRecency:
    def test_a_prefix_that_only_vllm_itself_served_is_in_use_as_well(self) -> None:
        """vLLM neither looks such chunks up nor stores them again."""
        vllm = Scheduling(slots=6)
        hot, cold = chunks("hot", 3), chunks("cold", 3)
        vllm.fill(hot)
        vllm.fill(cold)
        vllm.finish(vllm.arrive("r", hot))
        vllm.fill(chunks("another", 3))
        assert sorted(vllm.replica.evicted_keys) == sorted(cold)

    def test_a_prefix_goes_from_its_end(self) -> None:
        vllm = Scheduling(slots=6)
        keys = chunks("prompt", 6)
        vllm.fill(keys)
        vllm.fill(chunks("other", 2))
        assert vllm.replica.evicted_keys == [keys[5], keys[4]]

    def test_touch_counts_where_vllm_still_calls_it(self) -> None:
        """Up to 0.30, which tells no keys in advance."""
        vllm = Scheduling(slots=6)
        hot, cold = chunks("hot", 3), chunks("cold", 3)
        vllm.fill(hot)
        vllm.fill(cold)
        request = vllm.arrive("r", hot, recorded=False)
        vllm.manager.touch(hot, request.context)
        vllm.fill(chunks("another", 3))
        assert sorted(vllm.replica.evicted_keys) == sorted(cold)


class TestCapacity:
    """Eviction, where peers hold some of it as well."""

    def copied(self, keys: list[OffloadKey]) -> Scheduling:
        """A pool of twelve rows: these chunks copied from the peer `a`, then others."""
        vllm = Scheduling(slots=12)
        vllm.fill(chunks("old", 2))
        vllm.replica.peers_hold(a=keys)
        request = vllm.arrive("r", keys)
        vllm.attempt(request)
        vllm.replica.end(vllm.replica.fetches[-1])
        vllm.attempt(request)
        vllm.finish(request)
        vllm.end_step()
        vllm.fill(chunks("new", 10 - len(keys)))
        return vllm

    def test_a_copy_goes_from_its_end_before_what_is_only_here(self) -> None:
        keys = chunks("prompt", 4)
        vllm = self.copied(keys)
        vllm.fill(chunks("more", 3))
        assert vllm.replica.evicted_keys == [keys[3], keys[2], keys[1]]

    def test_a_copy_stays_where_the_original_is_gone(self) -> None:
        keys = chunks("prompt", 4)
        vllm = self.copied(keys)
        vllm.replica.peers_hold(a=keys[:1], b=keys)
        vllm.fill(chunks("more", 2))
        assert set(vllm.replica.evicted_keys) == {keys[0], chunks("old", 2)[1]}

    def test_an_original_stays_whoever_has_copied_it(self) -> None:
        vllm = self.copied(chunks("prompt", 4))
        vllm.replica.peers_hold(a=chunks("old", 2))
        vllm.fill(chunks("more", 2))
        assert set(vllm.replica.evicted_keys) == set(chunks("old", 2)), "by its age"

    def test_a_copy_that_is_in_use_stays(self) -> None:
        keys = chunks("prompt", 4)
        vllm = self.copied(keys)
        for number in range(20):
            request = vllm.arrive(f"again {number}", keys)
            assert vllm.attempt(request) == 4
            vllm.finish(request)
            vllm.fill(chunks(f"more {number}", 2))
        assert len(vllm.replica.fetches) == 1


class TestReset:
    def test_nothing_from_before_is_a_hit(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 4)
        vllm.fill(keys)
        vllm.manager.reset_cache()
        assert vllm.attempt(vllm.arrive("r", keys)) == 0

    def test_what_old_jobs_write_or_read_stays_out_of_use_until_a_later_job_is_complete(
        self, vllm: Scheduling
    ) -> None:
        stored = chunks("stored", 3)
        vllm.fill(chunks("loaded", 4))
        loading = vllm.arrive("l", chunks("loaded", 4))
        vllm.scan(loading)
        vllm.schedule(loading, 4)
        storing = vllm.arrive("s", stored)
        vllm.begin_store(storing, stored)

        vllm.manager.reset_cache()
        assert vllm.pool.counts() == PoolCounts(
            rows=32, ready=0, filling=0, pinned=4, quarantined=7
        )

        begun = vllm.begin_store(storing, stored)
        assert vllm.pool.counts().quarantined == 7
        vllm.stored(storing, begun)
        assert vllm.pool.counts().ready == 3
        assert_nothing_left(vllm)

    def test_what_old_jobs_touch_is_free_when_vllm_says_that_they_are_done(
        self, vllm: Scheduling
    ) -> None:
        """vLLM says so from 0.33 on."""
        storing = vllm.arrive("s", chunks("stored", 3))
        vllm.begin_store(storing, storing.keys)
        vllm.manager.reset_cache()
        vllm.manager.on_reset_flushed()
        assert_nothing_left(vllm)

    def test_a_fetch_under_way_brings_nothing(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0
        assert vllm.pool.counts().quarantined == 6
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_rows_that_a_request_was_about_to_load_are_gone(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_a_request_that_waits_may_finish_or_be_scheduled_afterwards(
        self, vllm: Scheduling
    ) -> None:
        first = waiting(vllm)
        second = vllm.arrive("s", first.keys)
        vllm.attempt(second)
        vllm.manager.reset_cache()
        vllm.finish(first)
        vllm.schedule(second, vllm.scan(second) or 0)
        vllm.replica.end(vllm.replica.fetches[0])
        vllm.end_step()
        vllm.finish(second)
        assert_nothing_left(vllm)

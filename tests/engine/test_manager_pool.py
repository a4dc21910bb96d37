"""Stores, evictions and resets, as the manager does them."""

from __future__ import annotations

import pytest

from tests.engine.scheduling import Scheduling, assert_nothing_left, chunks, waiting
from xinference_xavier.pool.pool import PoolCounts


class TestStore:
    def test_is_published_once_it_is_complete(self, vllm: Scheduling) -> None:
        request = vllm.ask(4)
        begun = vllm.begin_store(request, request.keys)
        assert (begun, vllm.tier.stored_rows) == (request.keys, [])
        vllm.stored(request, begun)
        assert {row.key for row in vllm.tier.stored_rows} == set(request.keys)

    def test_that_fails_leaves_nothing(self, vllm: Scheduling) -> None:
        request = vllm.ask(4)
        begun = vllm.begin_store(request, request.keys)
        vllm.manager.complete_store(begun, request.context, success=False)
        assert vllm.tier.stored_rows == []
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_that_is_void_frees_its_rows(self, vllm: Scheduling) -> None:
        """vLLM's workers would write wrong bytes into them."""
        request = vllm.ask(3)
        begun = vllm.begin_store(request, request.keys)
        vllm.manager.void_store(request.req_id, begun)
        vllm.stored(request, begun)
        assert vllm.tier.stored_rows == []
        assert_nothing_left(vllm)
        vllm.stored(request, vllm.begin_store(request, request.keys))
        assert len(vllm.tier.stored_rows) == 3

    def test_skips_chunks_that_are_held_or_being_stored(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.fill(keys[:2])
        first, second = vllm.arrive("r", keys), vllm.arrive("s", keys)
        assert vllm.begin_store(first, keys[:4]) == keys[2:4]
        assert vllm.begin_store(second, keys) == keys[4:]

    def test_drops_the_tail_for_which_its_own_prefix_would_be_evicted(self) -> None:
        vllm = Scheduling(slots=6)
        request = vllm.ask(10)
        vllm.fill(request.keys[:4])
        vllm.fill(chunks("other", 2))
        assert vllm.begin_store(request, request.keys[4:]) == request.keys[4:6]
        assert sorted(vllm.tier.evicted_keys) == sorted(chunks("other", 2))

    def test_evicts_the_least_recently_used_and_reports_it(self) -> None:
        vllm = Scheduling(slots=6)
        for name in ("old", "new"):
            vllm.fill(chunks(name, 3))
        request = vllm.ask(3)
        vllm.begin_store(request, request.keys)
        assert sorted(vllm.tier.evicted_keys) == sorted(chunks("old", 3))

    def test_finds_a_few_rows_free_that_steps_have_evicted(self) -> None:
        vllm = Scheduling(slots=128)
        old = chunks("old", 128)
        vllm.fill(old)
        vllm.end_step()
        evicted = vllm.tier.evicted_keys[:]
        assert set(evicted) == set(old[-2:])
        request = vllm.ask(2)
        assert vllm.begin_store(request, request.keys) == request.keys
        assert vllm.tier.evicted_keys == evicted

    def test_of_a_prompt_longer_than_the_pool_keeps_its_beginning(self) -> None:
        vllm = Scheduling(slots=128)
        request = vllm.ask(200)
        for number in range(0, 200, 8):
            vllm.stored(request, vllm.begin_store(request, request.keys[number : number + 8]))
            vllm.end_step()
        vllm.finish(request)
        hits = vllm.attempt(vllm.arrive("s", request.keys))
        assert hits is not None
        assert hits > 110

    def test_may_complete_after_its_request_has_ended(self, vllm: Scheduling) -> None:
        request = vllm.ask(4)
        begun = vllm.begin_store(request, request.keys)
        vllm.finish(request)
        vllm.stored(request, begun)
        assert_nothing_left(vllm)


class TestRecency:
    def test_a_prefix_that_vllm_itself_serves_is_in_use(self) -> None:
        """vLLM neither looks such chunks up nor stores them again."""
        vllm = Scheduling(slots=6)
        hot, cold = chunks("hot", 3), chunks("cold", 3)
        vllm.fill(hot)
        vllm.fill(cold)
        vllm.finish(vllm.arrive("r", hot))
        vllm.fill(chunks("another", 3))
        assert sorted(vllm.tier.evicted_keys) == sorted(cold)

    def test_a_prefix_is_evicted_from_its_end(self) -> None:
        vllm = Scheduling(slots=6)
        keys = chunks("prompt", 6)
        vllm.fill(keys)
        vllm.fill(chunks("other", 2))
        assert vllm.tier.evicted_keys == [keys[5], keys[4]]


class TestCapacity:
    """Eviction while peers hold some of the chunks."""

    KEYS = chunks("prompt", 4)

    @pytest.fixture
    def vllm(self) -> Scheduling:
        """A pool of twelve rows, all in use. Those of `KEYS` are copies from the peer `a`."""
        vllm = Scheduling(slots=12)
        vllm.fill(chunks("old", 2))
        request = waiting(vllm, 4)
        vllm.tier.end(vllm.tier.fetches[-1])
        vllm.attempt(request)
        vllm.finish(request)
        vllm.end_step()
        vllm.fill(chunks("new", 6))
        return vllm

    def test_copies_are_evicted_from_their_end_before_older_rows(self, vllm: Scheduling) -> None:
        vllm.fill(chunks("more", 3))
        assert vllm.tier.evicted_keys == self.KEYS[:0:-1]

    def test_a_copy_stays_if_the_original_is_gone(self, vllm: Scheduling) -> None:
        vllm.tier.peers_hold(a=self.KEYS[:1], b=self.KEYS)
        vllm.fill(chunks("more", 2))
        assert set(vllm.tier.evicted_keys) == {self.KEYS[0], chunks("old", 2)[1]}

    def test_an_original_stays_although_a_peer_copied_it(self, vllm: Scheduling) -> None:
        vllm.tier.peers_hold(a=chunks("old", 2))
        vllm.fill(chunks("more", 2))
        assert set(vllm.tier.evicted_keys) == set(chunks("old", 2)), "the oldest ones"

    def test_a_copy_in_use_stays(self, vllm: Scheduling) -> None:
        for number in range(20):
            request = vllm.arrive(f"again {number}", self.KEYS)
            assert vllm.attempt(request) == 4
            vllm.finish(request)
            vllm.fill(chunks(f"more {number}", 2))
        assert len(vllm.tier.fetches) == 1


class TestReset:
    def test_leaves_no_hits(self, vllm: Scheduling) -> None:
        vllm.fill(chunks("prompt", 4))
        vllm.manager.reset_cache()
        assert vllm.attempt(vllm.ask(4)) == 0

    def test_keeps_rows_of_jobs_in_quarantine_until_a_later_job_ends(
        self, vllm: Scheduling
    ) -> None:
        """Until then, no slot is reused that a job from before may write or read."""
        stored = chunks("stored", 3)
        vllm.fill(chunks("loaded", 4))
        loading = vllm.arrive("l", chunks("loaded", 4))
        vllm.scan(loading)
        vllm.schedule(loading, 4)
        storing = vllm.arrive("s", stored)
        vllm.begin_store(storing, stored)

        vllm.manager.reset_cache()
        in_quarantine = PoolCounts(rows=32, ready=0, filling=0, pinned=4, quarantined=7)
        assert vllm.pool.counts() == in_quarantine

        assert vllm.begin_store(storing, stored) == [], "they are of before the reset"
        vllm.manager.begin_lookups(storing.req_id, 0)
        begun = vllm.begin_store(storing, stored)
        assert vllm.pool.counts().quarantined == 7
        vllm.stored(storing, begun)
        assert vllm.pool.counts().ready == 3
        assert_nothing_left(vllm)

    def test_frees_rows_of_jobs_when_vllm_reports_their_end(self, vllm: Scheduling) -> None:
        """vLLM 0.33 and later report it."""
        storing = vllm.ask(3)
        vllm.begin_store(storing, storing.keys)
        vllm.manager.reset_cache()
        vllm.manager.on_reset_flushed()
        assert_nothing_left(vllm)

    def test_voids_a_pending_fetch(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0
        assert vllm.pool.counts().quarantined == 6
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_voids_rows_that_a_request_was_about_to_load(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0])
        vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0
        assert_nothing_left(vllm)

    def test_lets_waiting_requests_finish_or_be_scheduled(self, vllm: Scheduling) -> None:
        first = waiting(vllm)
        second = vllm.arrive("s", first.keys)
        vllm.attempt(second)
        vllm.manager.reset_cache()
        vllm.finish(first)
        vllm.schedule(second, vllm.scan(second) or 0)
        vllm.tier.end(vllm.tier.fetches[0])
        vllm.end_step()
        vllm.finish(second)
        assert_nothing_left(vllm)

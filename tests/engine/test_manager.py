"""What vLLM's scheduler may rely on: an answer at once or within the deadline, HITs that hold,
and nothing left behind whatever becomes of a request."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from tests.engine.scheduling import CHUNK, FETCH_TIMEOUT, Request, Scheduling, chunks, window_scan
from xinference_xavier.engine import idle
from xinference_xavier.engine.policy.donor_selection import FetchPolicy
from xinference_xavier.pool.pool import PoolCounts
from xinference_xavier.tiers.base import Fetch, FetchState


@pytest.fixture
def vllm() -> Scheduling:
    return Scheduling()


def waiting(vllm: Scheduling, count: int = 6, req_id: str = "r") -> Request:
    """A request that waits for the fetch of all its chunks from the peer `a`."""
    keys = chunks("prompt", count)
    vllm.replica.peers_hold(a=keys)
    request = vllm.arrive(req_id, keys)
    assert vllm.attempt(request) is None
    assert len(vllm.replica.fetches) == 1
    return request


def test_a_fetch_belongs_to_the_trace_of_the_request_that_began_it(vllm: Scheduling) -> None:
    keys, headers = chunks("prompt", 6), {"traceparent": "00-1-2-01"}
    vllm.replica.peers_hold(a=keys)
    request = vllm.arrive("r", keys)
    vllm.manager.trace(request.req_id, headers)
    vllm.attempt(request)
    (fetch,) = vllm.replica.fetches
    assert fetch.trace_headers == headers


def every_prompts_chunks(prompts: int) -> list[OffloadKey]:
    return [key for number in range(prompts) for key in chunks(f"prompt {number}", 4)]


def assert_nothing_left(vllm: Scheduling) -> None:
    counts = vllm.pool.counts()
    assert (counts.pinned, counts.filling, counts.quarantined) == (0, 0, 0)
    assert not vllm.manager.has_pending_work()


class TestLookup:
    def test_a_cold_request_gets_a_miss_at_once(self, vllm: Scheduling) -> None:
        request = vllm.arrive("r", chunks("prompt", 6))
        assert vllm.attempt(request) == 0
        assert vllm.replica.fetches == []
        assert not vllm.manager.has_pending_work()

    def test_chunks_in_the_own_pool_are_hits_up_to_the_first_gap(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.fill(keys[:3])
        vllm.fill(keys[4:])
        assert vllm.attempt(vllm.arrive("r", keys)) == 3

    def test_chunks_being_stored_are_no_hits_yet(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 4)
        storing = vllm.arrive("s", keys)
        begun = vllm.begin_store(storing, keys)
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request) == 0
        vllm.stored(storing, begun)
        assert vllm.attempt(request) == 4

    def test_too_short_a_run_is_not_worth_a_retry(self) -> None:
        vllm = Scheduling(min_fetch_chunks=4)
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys[:3])
        assert vllm.attempt(vllm.arrive("r", keys)) == 0
        vllm.replica.peers_hold(a=keys[:4])
        assert vllm.attempt(vllm.arrive("s", keys)) is None

    def test_the_end_of_a_prompt_is_too_short_a_run_as_well(self) -> None:
        vllm = Scheduling(min_fetch_chunks=4)
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys)
        vllm.fill(keys[:3])
        assert vllm.attempt(vllm.arrive("r", keys)) == 3

    def test_a_run_spread_over_two_peers_is_no_run(self) -> None:
        vllm = Scheduling(min_fetch_chunks=4)
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys[:2], b=keys[2:])
        assert vllm.attempt(vllm.arrive("r", keys)) == 0

    def test_chunks_being_stored_are_not_fetched_as_well(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.begin_store(vllm.arrive("s", keys), keys)
        vllm.replica.peers_hold(a=keys)
        assert vllm.attempt(vllm.arrive("r", keys)) == 0
        assert vllm.replica.fetches == []

    def test_nobody_is_asked_while_sharing_pauses(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys)
        vllm.replica.is_ready = False
        assert vllm.attempt(vllm.arrive("r", keys)) == 0


class TestFetch:
    def test_is_begun_once_at_the_end_of_the_step(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys[:4])
        request = vllm.arrive("r", keys)
        assert vllm.scan(request) is None
        assert vllm.replica.fetches == []
        vllm.end_step()
        vllm.end_step()
        (fetch,) = vllm.replica.fetches
        assert [row.key for row in fetch.rows] == keys[:4]
        assert fetch.deadline == vllm.clock.now + FETCH_TIMEOUT

    def test_goes_to_the_peer_with_the_longest_run(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys[:3], b=keys[:5], c=keys[:1] + keys[2:])
        vllm.attempt(vllm.arrive("r", keys))
        (fetch,) = vllm.replica.fetches
        assert (fetch.source, len(fetch.rows)) == ("b", 5)

    def test_of_equal_peers_each_has_its_turn(self, vllm: Scheduling) -> None:
        """Who is asked already is asked last."""
        vllm.replica.peers_hold(**{name: every_prompts_chunks(3) for name in "abc"})
        for number in range(3):
            vllm.attempt(vllm.arrive(f"r{number}", chunks(f"prompt {number}", 4)))
        assert {fetch.source for fetch in vllm.replica.fetches} == set("abc")

    def test_a_peer_that_was_quicker_is_preferred(self, vllm: Scheduling) -> None:
        vllm.replica.peers_hold(a=every_prompts_chunks(9), b=every_prompts_chunks(9))
        donors = []
        for number in range(9):
            request = vllm.arrive(f"r{number}", chunks(f"prompt {number}", 4))
            vllm.attempt(request)
            fetch = vllm.replica.fetches[-1]
            donors.append(fetch.source)
            vllm.replica.end(fetch, seconds=0.1 if fetch.source == "a" else 0.01)
            vllm.attempt(request)
            vllm.finish(request)
            vllm.end_step()
        assert set(donors[:4]) == {"a", "b"}, "both are tried, and a first fetch opens the link"
        assert set(donors[4:]) == {"b"}

    def test_begins_behind_what_is_at_hand(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 8)
        vllm.replica.peers_hold(a=keys)
        vllm.fill(keys[:4])
        assert vllm.attempt(vllm.arrive("r", keys), own_prefix=2) is None
        assert [row.key for row in vllm.replica.fetches[0].rows] == keys[4:]

    def test_while_it_is_under_way_one_retry_is_enough(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        answers = [vllm.manager.lookup(key, request.context) for key in request.keys]
        assert answers == [LookupResult.RETRY] + 5 * [LookupResult.MISS]
        assert vllm.manager.has_pending_work()

    def test_what_arrived_is_a_hit(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.attempt(request) == 6
        assert vllm.schedule(request, 6) == [row.slot for row in vllm.replica.fetches[0].rows]
        vllm.end_step()
        vllm.loaded(request, 6)
        vllm.finish(request)
        assert_nothing_left(vllm)

    @pytest.mark.parametrize("whole", [0, 2])
    def test_what_did_not_arrive_is_a_miss_and_is_not_fetched_again(
        self, vllm: Scheduling, whole: int
    ) -> None:
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0], whole)
        assert vllm.attempt(request) == whole
        assert vllm.attempt(request) == whole
        assert len(vllm.replica.fetches) == 1

    def test_another_request_may_try_again(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0], 0)
        vllm.attempt(request)
        assert vllm.attempt(vllm.arrive("s", request.keys)) is None
        assert len(vllm.replica.fetches) == 2

    def test_no_request_waits_longer_than_its_deadline(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.clock.now += FETCH_TIMEOUT - 0.01
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.01
        assert vllm.replica.fetches[0].state is FetchState.PENDING
        assert vllm.attempt(request) == 0

    def test_one_deadline_holds_for_all_fetches_of_a_request(self, vllm: Scheduling) -> None:
        """All of the first fetch arrived and a peer came to hold more: once more, in what is left
        of the time."""
        keys = chunks("prompt", 12)
        vllm.replica.peers_hold(a=keys[:6])
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request) is None
        first_deadline = vllm.replica.fetches[0].deadline
        vllm.clock.now += FETCH_TIMEOUT / 2
        vllm.replica.end(vllm.replica.fetches[0])
        vllm.replica.peers_hold(a=keys)
        assert vllm.attempt(request) is None
        assert vllm.replica.fetches[1].deadline == first_deadline
        vllm.clock.now = first_deadline
        assert vllm.attempt(request) == 6
        assert len(vllm.replica.fetches) == 2

    def test_after_the_deadline_nothing_is_waited_for_any_more(self, vllm: Scheduling) -> None:
        """Not even for a fetch that another request has begun meanwhile."""
        keys = chunks("prompt", 12)
        vllm.replica.peers_hold(a=keys[:6])
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request) is None
        vllm.replica.end(vllm.replica.fetches[0])
        vllm.clock.now += FETCH_TIMEOUT
        vllm.replica.peers_hold(a=keys)
        assert vllm.attempt(vllm.arrive("other", keys)) is None
        assert vllm.attempt(request) == 6

    def test_two_requests_for_the_same_chunks_share_one(self, vllm: Scheduling) -> None:
        first = waiting(vllm)
        second = vllm.arrive("s", first.keys)
        assert vllm.attempt(second) is None
        assert len(vllm.replica.fetches) == 1
        vllm.replica.end(vllm.replica.fetches[0])
        for request in (first, second):
            assert vllm.attempt(request) == 6
            vllm.schedule(request, 6)
            vllm.end_step()
        for request in (first, second):
            vllm.loaded(request, 6)
            vllm.finish(request)
        assert_nothing_left(vllm)

    def test_two_requests_of_one_step_share_one(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys)
        requests = [vllm.arrive(name, keys) for name in "rs"]
        assert [vllm.scan(request) for request in requests] == [None, None]
        vllm.end_step()
        assert len(vllm.replica.fetches) == 1

    def test_a_retried_chunk_is_known_to_be_under_way_after_an_older_fetch_settles(
        self, vllm: Scheduling
    ) -> None:
        """Rows that one fetch rolled back are taken by the next one in the very step in which the
        manager takes note of the first one's end."""
        first = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0], 1)
        second = vllm.arrive("s", first.keys)
        assert vllm.attempt(second) is None
        assert len(vllm.replica.fetches) == 2
        third = vllm.arrive("t", first.keys)
        assert vllm.attempt(third) is None
        assert len(vllm.replica.fetches) == 2

    def test_a_replica_that_has_stopped_costs_one_retry(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys)
        vllm.replica.listening = False
        request = vllm.arrive("r", keys)
        assert [vllm.attempt(request), vllm.attempt(request)] == [None, 0]
        assert_nothing_left(vllm)

    def test_a_pool_without_room_costs_one_retry(self) -> None:
        vllm = Scheduling(slots=4)
        keys = chunks("prompt", 4)
        storing = vllm.arrive("s", chunks("other", 4))
        vllm.begin_store(storing, storing.keys)
        vllm.replica.peers_hold(a=keys)
        request = vllm.arrive("r", keys)
        assert [vllm.attempt(request), vllm.attempt(request)] == [None, 0]
        assert vllm.replica.fetches == []

    def test_without_keys_in_advance_the_run_is_measured_afterwards(self) -> None:
        """Up to vLLM 0.30: too short a run costs one RETRY."""
        vllm = Scheduling(min_fetch_chunks=4)
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys[:3])
        request = vllm.arrive("r", keys, recorded=False)
        assert [vllm.attempt(request), vllm.attempt(request)] == [None, 0]
        vllm.replica.peers_hold(a=keys)
        assert vllm.attempt(vllm.arrive("s", keys, recorded=False)) is None
        assert len(vllm.replica.fetches[0].rows) == 6


class TestSeveralDonors:
    """One of them brings the first rows and another the rest."""

    @pytest.fixture
    def halves(self, vllm: Scheduling) -> tuple[Request, Fetch, Fetch]:
        """Six chunks, of which either donor brings three."""
        for number in range(4):  # the first fetch from each opens a link
            other = chunks(f"other {number}", 6)
            vllm.replica.peers_hold(**{"ab"[number % 2]: other})
            earlier = vllm.arrive(f"earlier {number}", other)
            vllm.attempt(earlier)
            vllm.replica.end(vllm.replica.fetches[-1])
            vllm.attempt(earlier)
            vllm.finish(earlier)
            vllm.end_step()
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys, b=keys)
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request) is None
        first, second = vllm.replica.fetches[4:]
        assert {first.source, second.source} == {"a", "b"}
        assert [row.key for row in first.rows + second.rows] == keys
        return request, first, second

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_all_are_waited_for(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch], order: tuple[int, int]
    ) -> None:
        request, *fetches = halves
        vllm.replica.end(fetches[order[0]])
        assert vllm.attempt(request) is None
        vllm.replica.end(fetches[order[1]])
        assert vllm.attempt(request) == 6
        vllm.schedule(request, 6)
        vllm.end_step()
        vllm.loaded(request, 6)
        vllm.finish(request)
        assert vllm.manager.stats()["hits"]["remote"] == 6 * CHUNK
        assert_nothing_left(vllm)

    def test_what_came_before_a_gap_is_used(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        request, first, second = halves
        vllm.replica.end(first)
        vllm.replica.end(second, 1)
        assert [vllm.attempt(request), vllm.attempt(request)] == [4, 4]

    def test_what_comes_behind_a_gap_is_not_waited_for(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        request, first, second = halves
        vllm.replica.end(first, 2)
        assert vllm.attempt(request) == 2
        vllm.schedule(request, 2)
        vllm.loaded(request, 2)
        vllm.replica.end(second)
        vllm.finish(request)
        vllm.end_step()
        assert_nothing_left(vllm)

    def test_another_request_waits_for_all_of_them_too(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        request, first, second = halves
        other = vllm.arrive("s", request.keys)
        assert vllm.attempt(other) is None
        vllm.replica.end(first)
        assert vllm.attempt(other) is None
        vllm.replica.end(second)
        assert vllm.attempt(other) == 6
        assert len(vllm.replica.fetches) == 6

    def test_each_row_is_a_copy_of_its_own_donor_s(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        for fetch in halves[1:]:
            assert {row.replicated_from for row in fetch.rows} == {fetch.source}


class TestFetchedRows:
    """They are held for the requests that wait for them, and for nobody else."""

    def test_hold_while_their_request_finds_no_room(self) -> None:
        vllm = Scheduling(slots=8)
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        for number in range(4):
            assert vllm.attempt(request) == 6  # a HIT, but no blocks for it
            vllm.fill(chunks(f"other {number}", 2))
        assert vllm.attempt(request) == 6

    def test_hold_no_longer_than_a_time_limit(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.attempt(request) == 6
        vllm.clock.now += 2 * FETCH_TIMEOUT + 0.01
        assert vllm.attempt(request) == 6
        assert_nothing_left(vllm)

    def test_of_a_request_that_never_found_room_are_not_fetched_again(self) -> None:
        """They had to go in the end, for others; it computes them rather than start over."""
        vllm = Scheduling(slots=6)
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.attempt(request) == 6
        vllm.clock.now += 2 * FETCH_TIMEOUT + 0.01
        assert vllm.attempt(request) == 6
        vllm.fill(chunks("other", 6))
        assert [vllm.attempt(request), vllm.attempt(request)] == [0, 0]
        assert len(vllm.replica.fetches) == 1
        assert_nothing_left(vllm)

    def test_that_one_request_waits_for_are_not_taken_from_it_by_another_s_fetch(self) -> None:
        """A crowd that wants far more than the pool holds: each request fetches once at most, those
        that find no room are computed, and all are served."""
        vllm = Scheduling(slots=8)
        prompts = [chunks(f"prompt {number}", 4) for number in range(6)]
        vllm.replica.peers_hold(a=[key for keys in prompts for key in keys])
        crowd = [vllm.arrive(f"r{number}", keys) for number, keys in enumerate(prompts)]
        assert [vllm.scan(request) for request in crowd] == 6 * [None]
        vllm.end_step()
        assert [fetch.rows[0].key for fetch in vllm.replica.fetches] == [
            prompts[0][0], prompts[1][0],
        ]  # fmt: skip
        assert [vllm.scan(request) for request in crowd] == [None, None, 0, 0, 0, 0]
        vllm.end_step()
        for fetch in vllm.replica.fetches:
            vllm.replica.end(fetch)
        vllm.end_step()
        for request in crowd[2:]:  # computed meanwhile, and not to be stored: no room
            vllm.schedule(request, 0)
            assert vllm.begin_store(request, request.keys) == []
            vllm.finish(request)
        for request in crowd[:2]:
            assert vllm.scan(request) == 4
            vllm.schedule(request, 4)
            vllm.end_step()
            vllm.loaded(request, 4)
            vllm.finish(request)
        assert len(vllm.replica.fetches) == 2
        assert_nothing_left(vllm)

    def test_are_pinned_until_they_are_loaded(self) -> None:
        vllm = Scheduling(slots=6)
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.scan(request) == 6
        vllm.schedule(request, 6)
        vllm.end_step()
        assert vllm.pool.counts().pinned == 6
        assert vllm.begin_store(vllm.arrive("s", chunks("other", 2)), chunks("other", 2)) == []
        vllm.loaded(request, 6)
        assert vllm.pool.counts().pinned == 0

    def test_are_let_go_when_their_request_does_without(self, vllm: Scheduling) -> None:
        """vLLM's own prefix cache came to hold all of it meanwhile."""
        request = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.scan(request, own_prefix=6) == 0
        vllm.schedule(request, 0, own_prefix=6)
        vllm.end_step()
        assert_nothing_left(vllm)

    @pytest.mark.parametrize("arrived", [False, True])
    def test_are_let_go_when_their_request_is_aborted(
        self, vllm: Scheduling, arrived: bool
    ) -> None:
        request = waiting(vllm)
        if arrived:
            vllm.replica.end(vllm.replica.fetches[0])
        vllm.finish(request)
        vllm.end_step()
        if not arrived:
            assert vllm.manager.has_pending_work()
            vllm.replica.end(vllm.replica.fetches[0])
            vllm.end_step()
        assert_nothing_left(vllm)
        assert vllm.pool.counts().ready == 6

    def test_of_a_request_aborted_between_its_lookup_and_the_step_s_end(
        self, vllm: Scheduling
    ) -> None:
        keys = chunks("prompt", 6)
        vllm.replica.peers_hold(a=keys)
        request = vllm.arrive("r", keys)
        vllm.scan(request)
        vllm.finish(request)
        vllm.end_step()
        assert vllm.replica.fetches == []

    def test_stay_in_quarantine_when_their_fetch_is_given_up(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.replica.abandon(vllm.replica.fetches[0])
        assert vllm.scan(request) == 0
        vllm.schedule(request, 0)
        vllm.end_step()
        assert vllm.pool.counts().quarantined == 6
        assert not vllm.manager.has_pending_work()
        vllm.replica.drain(vllm.replica.fetches[0])
        assert_nothing_left(vllm)

    def test_do_not_drive_out_the_prefix_they_continue(self) -> None:
        """The oldest chunks of the pool are those that the fetched ones continue."""
        vllm = Scheduling(slots=8)
        keys = chunks("prompt", 8)
        vllm.fill(keys[:4])
        vllm.fill(chunks("other", 4))
        vllm.replica.peers_hold(a=keys)
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request) is None
        assert sorted(vllm.replica.evicted_keys) == sorted(chunks("other", 4))
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.attempt(request) == 8


class TestHit:
    def test_that_finds_no_room_in_the_engine_leaves_nothing(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.fill(keys)
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request) == 6
        vllm.finish(request)
        assert_nothing_left(vllm)

    def test_holds_until_its_load_is_complete(self) -> None:
        vllm = Scheduling(slots=6)
        keys = chunks("prompt", 6)
        vllm.fill(keys)
        request = vllm.arrive("r", keys)
        assert vllm.scan(request) == 6
        vllm.schedule(request, 6)
        other = vllm.arrive("s", chunks("other", 6))
        assert vllm.begin_store(other, other.keys) == []
        vllm.loaded(request, 6)
        assert vllm.begin_store(other, other.keys) == other.keys

    def test_s_load_may_be_complete_after_its_request(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.fill(keys)
        request = vllm.arrive("r", keys)
        vllm.scan(request)
        vllm.schedule(request, 6)
        vllm.finish(request)
        assert vllm.pool.counts().pinned == 6
        vllm.loaded(request, 6)
        assert_nothing_left(vllm)


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


class TestAccounting:
    """Each prompt token is counted under where its KV came from."""

    def counts(self, vllm: Scheduling) -> dict[str, int]:
        hits: dict[str, int] = vllm.manager.stats()["hits"]
        return {name: tokens // CHUNK for name, tokens in hits.items()}

    def test_of_a_cold_request(self, vllm: Scheduling) -> None:
        request = vllm.arrive("r", chunks("prompt", 6))
        vllm.scan(request, own_prefix=1)
        vllm.schedule(request, 0, own_prefix=1)
        assert self.counts(vllm) == {
            "prefix_cache": 1, "local_pool": 0, "remote": 0, "computed": 5,
        }  # fmt: skip

    def test_of_a_request_with_something_from_everywhere(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 8)
        vllm.fill(keys[:3])
        vllm.replica.peers_hold(a=keys[:7])
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request, own_prefix=1) is None
        vllm.replica.end(vllm.replica.fetches[0])
        assert vllm.scan(request, own_prefix=1) == 6
        vllm.schedule(request, 6, own_prefix=1)
        assert self.counts(vllm) == {
            "prefix_cache": 1, "local_pool": 2, "remote": 4, "computed": 1,
        }  # fmt: skip

    def test_of_chunks_that_a_peer_supplied_to_an_earlier_request(self, vllm: Scheduling) -> None:
        first = waiting(vllm)
        vllm.replica.end(vllm.replica.fetches[0])
        vllm.schedule(first, vllm.scan(first) or 0)
        second = vllm.arrive("s", first.keys)
        vllm.schedule(second, vllm.scan(second) or 0)
        assert self.counts(vllm)["remote"] == 6
        assert self.counts(vllm)["local_pool"] == 6

    def test_of_finished_requests(self, vllm: Scheduling) -> None:
        vllm.finish(vllm.arrive("r", chunks("prompt", 1)))
        assert vllm.manager.stats()["requests"] == 1

    if find_spec("vllm.v1.metrics.cache_hit_source"):  # from 0.32 on

        def test_vllm_is_told_which_chunks_a_peer_supplied(self, vllm: Scheduling) -> None:
            """It asks only for chunks that it loads."""
            keys = chunks("prompt", 6)
            vllm.fill(keys[:2])
            vllm.replica.peers_hold(a=keys)
            request = vllm.arrive("r", keys)
            vllm.attempt(request)
            vllm.replica.end(vllm.replica.fetches[0])
            vllm.schedule(request, vllm.scan(request) or 0)
            sources = [vllm.manager.get_load_source(key, request.context).value for key in keys]
            assert sources == 2 * ["host"] + 4 * ["p2p"]


class TestTwoGroups:
    """Full attention, scanned from the start, and a sliding window, scanned from the end."""

    WINDOW = 2

    def scan(self, vllm: Scheduling, request: Request) -> tuple[int | None, int | None]:
        full = vllm.scan(request)
        lookup = vllm.manager.lookup
        return full, window_scan(lookup, request.groups[1], self.WINDOW, request.context)

    @pytest.fixture
    def request_of_two(self, vllm: Scheduling) -> Request:
        groups = chunks("prompt", 6, group=0), chunks("prompt", 6, group=1)
        vllm.replica.peers_hold(a=groups[0] + groups[1])
        return vllm.arrive("r", *groups)

    def test_each_group_gets_a_retry_while_the_fetch_is_under_way(
        self, vllm: Scheduling, request_of_two: Request
    ) -> None:
        """A group without one would be taken for a miss, and the request would run cold."""
        assert self.scan(vllm, request_of_two) == (None, None)
        vllm.end_step()
        assert len(vllm.replica.fetches) == 1
        assert self.scan(vllm, request_of_two) == (None, None)

    def test_what_arrived_is_a_hit_in_both(self, vllm: Scheduling, request_of_two: Request) -> None:
        self.scan(vllm, request_of_two)
        vllm.end_step()
        assert {row.key for row in vllm.replica.fetches[0].rows} == {
            key for group in request_of_two.groups for key in group
        }
        vllm.replica.end(vllm.replica.fetches[0])
        assert self.scan(vllm, request_of_two) == (6, 6)

    def test_equal_hashes_of_two_groups_are_two_chunks(self, vllm: Scheduling) -> None:
        vllm.fill(chunks("prompt", 6, group=1))
        assert vllm.attempt(vllm.arrive("r", chunks("prompt", 6, group=0))) == 0


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


class TestOnePrefillPerCluster:
    """A cold prompt of ten seconds, which comes to two replicas at once."""

    KEYS = chunks("prompt", 10)

    @pytest.fixture
    def vllm(self) -> Scheduling:
        vllm = Scheduling()
        vllm.replica.peers_hold(a=[])
        rate = vllm.manager.prefill_rate
        rate.add(1000, 1000 / CHUNK)
        vllm.manager.tier_lookup.step_tokens = 2 * CHUNK
        assert rate.tokens_per_second == CHUNK
        return vllm

    def asking(self, vllm: Scheduling) -> Request:
        request = vllm.arrive("r", self.KEYS)
        assert vllm.attempt(request) is None
        return request

    def waiting(self, vllm: Scheduling) -> Request:
        request = self.asking(vllm)
        vllm.replica.claims[0].held_by_peer = 10
        assert vllm.attempt(request) is None
        return request

    def test_the_tracker_is_asked_once_who_computes_it(self, vllm: Scheduling) -> None:
        request = self.asking(vllm)
        assert vllm.attempt(request) is None
        (claim,) = vllm.replica.claims
        assert (claim.keys, claim.seconds) == (self.KEYS, 10.0)

    def test_only_for_what_is_missing(self, vllm: Scheduling) -> None:
        vllm.fill(self.KEYS[:4])
        self.asking(vllm)
        (claim,) = vllm.replica.claims
        assert (claim.keys, claim.seconds) == (self.KEYS[4:], 6.0)

    def test_who_is_told_to_compute_does_and_lets_go_in_the_end(self, vllm: Scheduling) -> None:
        request = self.asking(vllm)
        vllm.replica.claims[0].held_by_peer = 0
        assert vllm.attempt(request) == 0
        vllm.schedule(request, 0)
        assert vllm.replica.released == []
        vllm.finish(request)
        assert vllm.replica.released == vllm.replica.claims
        assert vllm.manager.stats()["waits"]["claimed"] == 1

    def test_so_does_who_gets_no_answer(self, vllm: Scheduling) -> None:
        request = self.asking(vllm)
        vllm.clock.now += 1.0
        assert vllm.attempt(request) == 0

    def test_who_ends_before_the_answer_lets_go_as_well(self, vllm: Scheduling) -> None:
        vllm.finish(self.asking(vllm))
        assert vllm.replica.released == vllm.replica.claims

    def test_who_waits_fetches_chunks_as_they_are_finished(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        for finished in (4, 8):
            vllm.clock.now += 4.0
            vllm.replica.peers_hold(a=self.KEYS[:finished])
            assert vllm.attempt(request) is None
            fetch = vllm.replica.fetches[-1]
            assert [row.key for row in fetch.rows] == self.KEYS[finished - 4 : finished]
            assert fetch.deadline == vllm.clock.now + FETCH_TIMEOUT
            vllm.replica.end(fetch)
            assert vllm.attempt(request) is None
        vllm.clock.now += 2.0
        vllm.replica.peers_hold(a=self.KEYS)
        assert vllm.attempt(request) is None
        vllm.replica.end(vllm.replica.fetches[-1])
        assert vllm.attempt(request) == 10
        vllm.schedule(request, 10)
        vllm.end_step()
        vllm.loaded(request, 10)
        vllm.finish(request)
        assert_nothing_left(vllm)
        assert vllm.replica.released == []
        waits = vllm.manager.stats()["waits"]
        assert waits == {"claimed": 0, "waited": 1, "given_up": 0, "seconds": 10.0}

    def test_while_it_waits_one_retry_is_enough(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        answers = [vllm.manager.lookup(key, request.context) for key in self.KEYS]
        assert answers == [LookupResult.RETRY] + 9 * [LookupResult.MISS]

    def test_an_engine_that_only_waits_may_take_its_time(
        self, vllm: Scheduling, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []
        monkeypatch.setattr(idle, "time", SimpleNamespace(sleep=slept.append))

        def paused() -> float:
            slept.clear()
            vllm.manager.step_begins(0, 0, 0.0)
            vllm.manager.step_ends()
            return sum(slept)

        assert not paused()
        request = self.waiting(vllm)
        assert paused() == pytest.approx(2.0 / 50)  # steps of two seconds
        vllm.replica.peers_hold(a=self.KEYS[:4])
        for _ in range(2):
            vllm.attempt(request)
            assert not paused(), "rows are on their way"
        vllm.replica.end(vllm.replica.fetches[-1])
        assert not paused(), "they are here, and it may be its turn"
        vllm.attempt(request)
        assert paused() == pytest.approx(2.0 / 50), "it waits for more"
        other = vllm.arrive("other", chunks("other", 2))
        vllm.attempt(request)
        begun = vllm.begin_store(other, other.keys)
        vllm.attempt(request)
        assert not paused(), "what was computed is being stored"
        vllm.stored(other, begun)
        vllm.manager.step_begins(100, 0, 0.0)
        vllm.attempt(request)
        assert not paused(), "others are computed for"
        vllm.manager.step_ends()
        vllm.clock.now += 60.0
        assert vllm.attempt(request) == 4
        assert not paused(), "its turn has come"

    @pytest.mark.parametrize("steps", [1, 2])
    def test_an_engine_that_only_fetches_looks_again_when_the_fetch_has_ended(
        self, vllm: Scheduling, monkeypatch: pytest.MonkeyPatch, steps: int
    ) -> None:
        """In the step that begins it, or when it is looked for in a later one."""

        class Ending(threading.Event):
            """Ends the fetch when somebody waits for it."""

            def wait(self, timeout: float | None = None) -> bool:
                vllm.replica.end(fetch)
                return super().wait(timeout)

        monkeypatch.setattr(idle, "_POLL", 3600.0)
        vllm.replica.peers_hold(a=self.KEYS)
        request = vllm.arrive("request", self.KEYS)
        assert vllm.attempt(request) is None
        (fetch,) = vllm.replica.fetches
        if steps == 2:
            assert vllm.attempt(request) is None
        fetch.ended = Ending()
        vllm.manager.step_begins(0, 0, 0.0)
        assert (fetch.state is FetchState.PENDING) == (steps == 2)
        assert vllm.attempt(request) == len(self.KEYS)

    def test_one_that_computes_does_not_wait(self, vllm: Scheduling) -> None:
        class Busy(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                raise AssertionError("others are computed for")

        vllm.replica.peers_hold(a=self.KEYS)
        request = vllm.arrive("request", self.KEYS)
        assert vllm.attempt(request) is None
        vllm.manager.step_begins(0, 0, 0.0)
        vllm.end_step()  # something was scheduled
        (fetch,) = vllm.replica.fetches
        fetch.ended = Busy()
        assert vllm.attempt(request) is None

    def test_the_rest_is_computed_when_the_peer_falls_behind(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        vllm.replica.peers_hold(a=self.KEYS[:4])
        assert vllm.attempt(request) is None
        vllm.replica.end(vllm.replica.fetches[-1])
        vllm.clock.now += 4.0 + 2 * 2.0 + 2.5 - 0.01
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.01
        assert vllm.attempt(request) == 4
        vllm.schedule(request, 4)
        assert vllm.manager.stats()["waits"]["given_up"] == 1

    def test_a_fetch_that_fails_ends_the_waiting(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        vllm.replica.peers_hold(a=self.KEYS[:4])
        assert vllm.attempt(request) is None
        vllm.replica.end(vllm.replica.fetches[-1], 2)
        assert vllm.attempt(request) == 2

    @pytest.mark.parametrize("end", ["pause", "reset"])
    def test_so_does_the_end_of_sharing(self, vllm: Scheduling, end: str) -> None:
        request = self.waiting(vllm)
        if end == "pause":
            vllm.replica.is_ready = False
        else:
            vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0

    def test_so_does_a_peer_from_which_fetching_takes_longer_than_computing(
        self, vllm: Scheduling
    ) -> None:
        vllm.manager.tier_lookup._selection.policy = FetchPolicy.ADAPTIVE
        for number in range(2):
            keys = chunks(f"other {number}", 4)
            vllm.replica.peers_hold(a=keys)
            request = vllm.arrive(f"r{number}", keys)
            vllm.attempt(request)
            vllm.replica.end(vllm.replica.fetches[-1], seconds=20.0)
            vllm.attempt(request)
            vllm.finish(request)
        vllm.end_step()
        vllm.replica.peers_hold(a=[])
        request = self.waiting(vllm)
        vllm.replica.peers_hold(a=self.KEYS[:4])
        assert vllm.attempt(request) == 0

    @pytest.mark.parametrize(
        "why",
        [
            *("short", "too short to fetch", "not worth fetching", "rate unknown"),
            *("alone", "paused", "switched off"),
        ],
    )
    def test_nobody_is_asked_when_it_cannot_pay(self, vllm: Scheduling, why: str) -> None:
        keys = self.KEYS
        if why == "short":
            vllm.manager.prefill_rate.tokens_per_second = 10 * CHUNK + 1
        elif why == "too short to fetch":
            vllm.manager.tier_lookup._selection.min_chunks = 11
        elif why == "alone":
            vllm.replica.peers_hold()
        elif why == "paused":
            vllm.replica.is_ready = False
        elif why == "switched off":
            vllm.replica.mirror.enabled = False
        elif why == "rate unknown":
            vllm.manager.prefill_rate.tokens_per_second = None
        else:
            vllm.replica.peers_hold(a=keys[:1])
        assert vllm.attempt(vllm.arrive("r", keys)) == 0
        assert vllm.replica.claims == []

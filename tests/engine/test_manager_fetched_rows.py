"""Fetched rows stay for the request that waits for them, and nothing of them is left behind."""

from __future__ import annotations

import pytest

from tests.engine.scheduling import FETCH_TIMEOUT, Scheduling, assert_nothing_left, chunks, waiting


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

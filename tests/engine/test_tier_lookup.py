"""A request waits for fetches until they end or its deadline passes."""

from unittest.mock import Mock

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from tests.engine.scheduling import (
    CHUNK,
    FETCH_TIMEOUT,
    Request,
    Scheduling,
    assert_nothing_left,
    chunks,
    waiting,
)
from xinference_xavier.peers import Source
from xinference_xavier.pool.pool import Row
from xinference_xavier.replica.fetcher import Fetch, FetchState


def every_prompts_chunks(prompts: int) -> list[OffloadKey]:
    return [key for number in range(prompts) for key in chunks(f"prompt {number}", 4)]


class TestFetch:
    def test_begins_once_at_the_end_of_the_step(self, vllm: Scheduling) -> None:
        request = vllm.ask(6, a=4)
        assert vllm.scan(request) is None
        assert vllm.tier.fetches == []
        vllm.end_step()
        vllm.end_step()
        (fetch,) = vllm.tier.fetches
        assert [row.key for row in fetch.rows] == request.keys[:4]
        assert fetch.deadline == vllm.clock.now + FETCH_TIMEOUT

    def test_goes_to_the_peer_with_the_longest_run(self, vllm: Scheduling) -> None:
        keys = chunks("prompt", 6)
        vllm.tier.peers_hold(a=keys[:3], b=keys[:5], c=keys[:1] + keys[2:])
        vllm.attempt(vllm.arrive("r", keys))
        (fetch,) = vllm.tier.fetches
        assert (fetch.source, len(fetch.rows)) == ("b", 5)

    def test_goes_to_the_least_busy_of_equal_peers(self, vllm: Scheduling) -> None:
        vllm.tier.peers_hold(**{name: every_prompts_chunks(3) for name in "abc"})
        for number in range(3):
            vllm.attempt(vllm.arrive(f"r{number}", chunks(f"prompt {number}", 4)))
        assert {fetch.source for fetch in vllm.tier.fetches} == set("abc")

    def test_goes_to_the_peer_that_was_faster(self, vllm: Scheduling) -> None:
        vllm.tier.peers_hold(a=every_prompts_chunks(9), b=every_prompts_chunks(9))
        donors = []
        for number in range(9):
            request = vllm.arrive(f"r{number}", chunks(f"prompt {number}", 4))
            vllm.attempt(request)
            fetch = vllm.tier.fetches[-1]
            donors.append(fetch.source)
            vllm.tier.end(fetch, seconds=0.1 if fetch.source == "a" else 0.01)
            vllm.attempt(request)
            vllm.finish(request)
            vllm.end_step()
        assert set(donors[:4]) == {"a", "b"}, (
            "the first fetch from each opens a link, the second is measured"
        )
        assert set(donors[4:]) == {"b"}

    def test_begins_behind_the_hits(self, vllm: Scheduling) -> None:
        request = vllm.ask(8, a=8)
        vllm.fill(request.keys[:4])
        assert vllm.attempt(request, own_prefix=2) is None
        assert [row.key for row in vllm.tier.fetches[0].rows] == request.keys[4:]

    def test_defers_the_request_with_one_retry(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        answers = [vllm.manager.lookup(key, request.context) for key in request.keys]
        assert answers == [LookupResult.RETRY] + 5 * [LookupResult.MISS]
        assert vllm.manager.has_pending_work()

    def test_turns_chunks_that_arrived_into_hits(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.attempt(request) == 6
        assert vllm.schedule(request, 6) == [row.slot for row in vllm.tier.fetches[0].rows]

    def test_that_ends_during_a_lookup_has_brought_its_chunk(
        self, vllm: Scheduling, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the manager has looked into the pool, and before it asks about the fetch."""
        request = waiting(vllm)
        pool_lookup = vllm.pool.lookup

        def looks_too_early(key: bytes) -> Row | None:
            found = pool_lookup(key)
            if vllm.tier.fetches[0].state is FetchState.PENDING:
                vllm.tier.end(vllm.tier.fetches[0])
            return found

        monkeypatch.setattr(vllm.pool, "lookup", looks_too_early)
        assert vllm.attempt(request) == 6

    @pytest.mark.parametrize("whole", [0, 2])
    def test_chunks_that_did_not_arrive_are_misses_and_not_fetched_again(
        self, vllm: Scheduling, whole: int
    ) -> None:
        request = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0], whole)
        assert vllm.attempt(request) == whole
        assert vllm.attempt(request) == whole
        assert len(vllm.tier.fetches) == 1

    def test_may_be_tried_again_for_another_request(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0], 0)
        vllm.attempt(request)
        assert vllm.attempt(vllm.arrive("s", request.keys)) is None
        assert len(vllm.tier.fetches) == 2

    def test_is_waited_for_until_the_deadline(self, vllm: Scheduling) -> None:
        request = waiting(vllm)
        vllm.clock.now += FETCH_TIMEOUT - 0.01
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.01
        assert vllm.tier.fetches[0].state is FetchState.PENDING
        assert vllm.attempt(request) == 0

    def test_shares_one_deadline_with_the_request_s_other_fetches(self, vllm: Scheduling) -> None:
        """All of the first fetch arrives, and the peer then holds more. The second fetch gets the
        time that is left."""
        request = vllm.ask(12, a=6)
        assert vllm.attempt(request) is None
        first_deadline = vllm.tier.fetches[0].deadline
        vllm.clock.now += FETCH_TIMEOUT / 2
        vllm.tier.end(vllm.tier.fetches[0])
        vllm.tier.peers_hold(a=request.keys)
        assert vllm.attempt(request) is None
        assert vllm.tier.fetches[1].deadline == first_deadline
        vllm.clock.now = first_deadline
        assert vllm.attempt(request) == 6
        assert len(vllm.tier.fetches) == 2

    def test_is_not_waited_for_after_the_deadline(self, vllm: Scheduling) -> None:
        """Not even if another request began it."""
        request = vllm.ask(12, a=6)
        assert vllm.attempt(request) is None
        vllm.tier.end(vllm.tier.fetches[0])
        vllm.clock.now += FETCH_TIMEOUT
        assert vllm.attempt(vllm.ask(12, "other", a=12)) is None
        assert vllm.attempt(request) == 6

    def test_serves_two_requests_for_the_same_chunks(self, vllm: Scheduling) -> None:
        first = waiting(vllm)
        second = vllm.arrive("s", first.keys)
        assert vllm.attempt(second) is None
        assert len(vllm.tier.fetches) == 1
        vllm.tier.end(vllm.tier.fetches[0])
        assert [vllm.attempt(first), vllm.attempt(second)] == [6, 6]

    def test_serves_two_requests_of_one_step(self, vllm: Scheduling) -> None:
        requests = [vllm.ask(6, name, a=6) for name in "rs"]
        assert [vllm.scan(request) for request in requests] == [None, None]
        vllm.end_step()
        assert len(vllm.tier.fetches) == 1

    def test_that_retries_chunks_is_found_after_the_older_fetch_settles(
        self, vllm: Scheduling
    ) -> None:
        """The new fetch of rolled-back chunks begins in the very step in which the old one is
        settled."""
        first = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0], 1)
        second = vllm.arrive("s", first.keys)
        assert vllm.attempt(second) is None
        assert len(vllm.tier.fetches) == 2
        third = vllm.arrive("t", first.keys)
        assert vllm.attempt(third) is None
        assert len(vllm.tier.fetches) == 2

    def test_that_fails_while_others_join_it_is_followed_by_one_from_another_peer(
        self, vllm: Scheduling
    ) -> None:
        """It may fail at any time, also between a lookup and the end of the same step."""
        first = waiting(vllm)
        second = vllm.arrive("second", first.keys)
        assert vllm.scan(second) is None
        vllm.tier.peers_hold(b=first.keys)
        vllm.tier.end(vllm.tier.fetches[0], arrived=0)
        vllm.end_step()
        assert vllm.attempt(second) is None
        assert [fetch.source for fetch in vllm.tier.fetches] == ["a", "b"]

    def test_from_a_closed_tier_costs_one_retry(self, vllm: Scheduling) -> None:
        request = vllm.ask(6, a=6)
        vllm.tier.listening = False
        assert [vllm.attempt(request), vllm.attempt(request)] == [None, 0]
        assert_nothing_left(vllm)

    def test_into_a_full_pool_costs_one_retry(self) -> None:
        vllm = Scheduling(slots=4)
        storing = vllm.arrive("s", chunks("other", 4))
        vllm.begin_store(storing, storing.keys)
        request = vllm.ask(4, a=4)
        assert [vllm.attempt(request), vllm.attempt(request)] == [None, 0]
        assert vllm.tier.fetches == []


def test_rows_of_a_fetch_that_cannot_begin_are_free_again(
    vllm: Scheduling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "patience", Mock(side_effect=ArithmeticError))
    request = vllm.ask(4, a=4)
    assert vllm.attempt(request) is None
    assert vllm.pool.counts().filling == 0
    assert vllm.manager.stats()["scheduler_errors"] == 1
    vllm.clock.now += FETCH_TIMEOUT
    assert vllm.attempt(request) == 0, "it is computed when its time is over"


class TestPeerThatFails:
    """The peer `a` holds everything and never delivers."""

    def ask(self, vllm: Scheduling, name: str) -> str | None:
        """One request; the donor that it waited for, if any."""
        request = vllm.arrive(name, chunks(name, 6))
        waited = vllm.attempt(request) is None
        fetch = vllm.tier.fetches[-1] if vllm.tier.fetches else None
        if waited and fetch is not None:
            vllm.clock.now += 5.0 if fetch.source == "a" else 0.01
        for pending in vllm.tier.fetches:
            if pending.state is FetchState.PENDING:
                failing = pending.source == "a" and self.is_broken
                vllm.tier.end(pending, 0 if failing else None, seconds=5.0 if failing else 0.01)
        vllm.attempt(request)
        vllm.finish(request)
        vllm.end_step()
        return fetch.source if waited and fetch is not None else None

    @pytest.fixture
    def vllm(self) -> Scheduling:
        self.is_broken = True
        return Scheduling(slots=512)

    def hold(self, vllm: Scheduling, peers: str) -> None:
        keys = [key for number in range(100) for key in chunks(f"{number}", 6)]
        vllm.tier.only_hold(**dict.fromkeys(peers, keys))

    def fails(self, vllm: Scheduling) -> None:
        """Two requests wait for the peer in vain."""
        self.hold(vllm, "a")
        assert [self.ask(vllm, name) for name in "01"] == ["a", "a"]

    def test_is_not_preferred_to_a_healthy_one(self, vllm: Scheduling) -> None:
        self.hold(vllm, "ab")
        donors = [self.ask(vllm, f"{number}") for number in range(20)]
        assert donors.count("a") <= 2
        assert donors[4:] == 16 * ["b"]

    def test_is_tried_by_a_request_that_computes(self, vllm: Scheduling) -> None:
        self.fails(vllm)
        began = len(vllm.tier.fetches)
        assert self.ask(vllm, "2") is None
        assert len(vllm.tier.fetches) == began, "not at once"
        vllm.clock.now += 1.0
        assert self.ask(vllm, "3") is None, "it does not wait"
        (probe,) = vllm.tier.fetches[began:]
        assert [row.key for row in probe.rows] == chunks("3", 6)[-1:]
        assert self.ask(vllm, "4") is None
        assert len(vllm.tier.fetches) == began + 1, "one probe"

    def test_nobody_waits_for_a_probe(self, vllm: Scheduling) -> None:
        """Not even a request that could use the chunk."""
        self.fails(vllm)
        vllm.clock.now += 1.0
        assert vllm.attempt(vllm.arrive("probing", chunks("2", 6))) == 0
        probe = vllm.tier.fetches[-1]
        self.hold(vllm, "ab")
        request = vllm.arrive("r", chunks("2", 6))
        assert vllm.attempt(request) is None
        vllm.tier.end(vllm.tier.fetches[-1])
        assert vllm.attempt(request) == 5
        assert probe.state is FetchState.PENDING

    def test_is_used_again_after_a_probe(self, vllm: Scheduling) -> None:
        self.fails(vllm)
        self.is_broken = False
        vllm.clock.now += 1.0
        assert [self.ask(vllm, f"{number}") for number in (2, 3, 4)] == [None, "a", "a"]
        assert_nothing_left(vllm)

    def test_gets_no_more_time_than_its_fetches_took_before(self, vllm: Scheduling) -> None:
        self.is_broken = False
        self.hold(vllm, "a")
        for number in range(3):
            self.ask(vllm, f"{number}")
        assert vllm.attempt(vllm.arrive("r", chunks("9", 6))) is None
        assert vllm.tier.fetches[-1].deadline == vllm.clock.now + 1.0


class TestSeveralDonors:
    """One donor brings the first rows, another the rest."""

    @pytest.fixture
    def halves(self, vllm: Scheduling) -> tuple[Request, Fetch, Fetch]:
        """A request for six chunks, and the fetches that bring three each."""
        for number in range(4):  # the first fetch from each opens a link
            other = chunks(f"other {number}", 6)
            vllm.tier.only_hold(**{"ab"[number % 2]: other})
            vllm.fetch_and_finish(vllm.arrive(f"earlier {number}", other))
        request = vllm.ask(6, a=6, b=6)
        assert vllm.attempt(request) is None
        first, second = vllm.tier.fetches[4:]
        assert {first.source, second.source} == {"a", "b"}
        assert [row.key for row in first.rows + second.rows] == request.keys
        return request, first, second

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_all_of_them_are_waited_for(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch], order: tuple[int, int]
    ) -> None:
        request, *fetches = halves
        vllm.tier.end(fetches[order[0]])
        assert vllm.attempt(request) is None
        vllm.tier.end(fetches[order[1]])
        assert vllm.attempt(request) == 6
        vllm.load_and_finish(request, 6)
        assert vllm.manager.stats()["hits"]["remote"] == 6 * CHUNK
        assert_nothing_left(vllm)

    def test_chunks_before_a_gap_are_used(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        request, first, second = halves
        vllm.tier.peers_hold()
        vllm.tier.end(first)
        vllm.tier.end(second, 1)
        assert [vllm.attempt(request), vllm.attempt(request)] == [4, 4]

    def test_another_donor_brings_what_one_did_not(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        request, first, second = halves
        vllm.tier.end(first)
        vllm.tier.end(second, 1)
        assert vllm.attempt(request) is None
        again = vllm.tier.fetches[-1]
        assert (again.source, [row.key for row in again.rows]) == (first.source, request.keys[4:])
        assert again.deadline == first.deadline, "within the request's time"
        vllm.tier.end(again)
        assert vllm.attempt(request) == 6

    def test_chunks_behind_a_gap_are_not_waited_for(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        request, first, second = halves
        vllm.tier.end(first, 2)
        assert vllm.attempt(request) == 2
        vllm.schedule(request, 2)
        vllm.loaded(request, 2)
        vllm.tier.end(second)
        vllm.finish(request)
        vllm.end_step()
        assert_nothing_left(vllm)

    def test_each_row_is_a_copy_of_its_donor_s(
        self, vllm: Scheduling, halves: tuple[Request, Fetch, Fetch]
    ) -> None:
        for fetch in halves[1:]:
            assert {row.replicated_from for row in fetch.rows} == {fetch.source}

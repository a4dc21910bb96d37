"""A request waits for a peer that computes the same prompt, as long as that can pay."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.engine.scheduling import (
    CHUNK,
    FETCH_TIMEOUT,
    SERVING,
    Request,
    Scheduling,
    assert_nothing_left,
    chunks,
    slow_engine,
    waiting_for_prefill,
)
from xinference_xavier.protocol.load import Elsewhere, with_mark


class TestOnePrefillPerCluster:
    """Two replicas get a cold prompt that takes ten seconds to compute."""

    KEYS = chunks("prompt", 10)

    @pytest.fixture
    def vllm(self) -> Scheduling:
        return slow_engine()

    def asking(self, vllm: Scheduling) -> Request:
        request = vllm.arrive("r", self.KEYS)
        assert vllm.attempt(request) is None
        return request

    def waiting(self, vllm: Scheduling) -> Request:
        return waiting_for_prefill(vllm, self.KEYS)

    def test_the_tracker_is_asked_once(self, vllm: Scheduling) -> None:
        request = self.asking(vllm)
        assert vllm.attempt(request) is None
        (claim,) = vllm.tier.claims
        assert (claim.keys, claim.seconds) == (self.KEYS, 10.0)

    def test_only_missing_chunks_are_claimed(self, vllm: Scheduling) -> None:
        vllm.fill(self.KEYS[:4])
        self.asking(vllm)
        (claim,) = vllm.tier.claims
        assert (claim.keys, claim.seconds) == (self.KEYS[4:], 6.0)

    def test_a_request_that_holds_the_claim_computes_and_releases_it(
        self, vllm: Scheduling
    ) -> None:
        request = self.asking(vllm)
        vllm.tier.claims[0].held_by_peer = 0
        assert vllm.attempt(request) == 0
        vllm.schedule(request, 0)
        assert vllm.tier.released == []
        vllm.finish(request)
        assert vllm.tier.released == vllm.tier.claims
        assert vllm.manager.stats()["waits"]["claimed"] == 1

    def test_a_request_without_an_answer_computes(self, vllm: Scheduling) -> None:
        request = self.asking(vllm)
        vllm.clock.now += 1.0
        assert vllm.attempt(request) == 0

    def test_a_request_that_ends_before_the_answer_releases_its_claim(
        self, vllm: Scheduling
    ) -> None:
        vllm.finish(self.asking(vllm))
        assert vllm.tier.released == vllm.tier.claims

    def test_a_waiting_request_fetches_chunks_as_they_are_finished(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        for finished in (4, 8):
            vllm.clock.now += 4.0
            vllm.tier.peers_hold(a=self.KEYS[:finished])
            assert vllm.attempt(request) is None
            fetch = vllm.tier.fetches[-1]
            assert [row.key for row in fetch.rows] == self.KEYS[finished - 4 : finished]
            assert fetch.deadline == vllm.clock.now + FETCH_TIMEOUT
            vllm.tier.end(fetch)
            assert vllm.attempt(request) is None
        vllm.clock.now += 2.0
        vllm.tier.peers_hold(a=self.KEYS)
        assert vllm.attempt(request) is None
        vllm.tier.end(vllm.tier.fetches[-1])
        assert vllm.attempt(request) == 10
        vllm.schedule(request, 10)
        vllm.end_step()
        vllm.loaded(request, 10)
        vllm.finish(request)
        assert_nothing_left(vllm)
        assert vllm.tier.released == []
        waits = vllm.manager.stats()["waits"]
        assert waits == {"claimed": 0, "waited": 1, "given_up": 0, "seconds": 10.0}

    def test_one_retry_defers_the_request(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        answers = [vllm.manager.lookup(key, request.context) for key in self.KEYS]
        assert answers == [LookupResult.RETRY] + 9 * [LookupResult.MISS]

    def test_a_peer_that_falls_behind_ends_the_wait(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        vllm.tier.peers_hold(a=self.KEYS[:4])
        assert vllm.attempt(request) is None
        vllm.tier.end(vllm.tier.fetches[-1])
        vllm.clock.now += 4.0 + 2 * 2.0 + 2.5 - 0.01
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.01
        assert vllm.attempt(request) == 4
        vllm.schedule(request, 4)
        assert vllm.manager.stats()["waits"]["given_up"] == 1

    def test_a_failed_fetch_ends_the_wait(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        vllm.tier.peers_hold(a=self.KEYS[:4])
        assert vllm.attempt(request) is None
        vllm.tier.end(vllm.tier.fetches[-1], 2)
        assert vllm.attempt(request) == 2

    @pytest.mark.parametrize("end", ["pause", "reset"])
    def test_the_end_of_sharing_ends_the_wait(self, vllm: Scheduling, end: str) -> None:
        request = self.waiting(vllm)
        if end == "pause":
            vllm.tier.is_ready = False
        else:
            vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0

    def test_a_peer_that_is_slower_than_computing_ends_the_wait(self, vllm: Scheduling) -> None:
        vllm.manager.tier_lookup._selection.adaptive = True
        for number in range(2):
            keys = chunks(f"other {number}", 4)
            vllm.tier.peers_hold(a=keys)
            request = vllm.arrive(f"r{number}", keys)
            vllm.attempt(request)
            vllm.tier.end(vllm.tier.fetches[-1], seconds=20.0)
            vllm.attempt(request)
            vllm.finish(request)
        vllm.end_step()
        vllm.tier.peers_hold(a=[])
        request = self.waiting(vllm)
        vllm.tier.peers_hold(a=self.KEYS[:4])
        assert vllm.attempt(request) == 0

    @pytest.mark.parametrize(
        "why",
        [
            *("short", "too short to fetch", "not worth fetching", "rate unknown"),
            *("alone", "paused", "switched off"),
        ],
    )
    def test_the_tracker_is_not_asked_if_waiting_cannot_pay(
        self, vllm: Scheduling, why: str
    ) -> None:
        keys = self.KEYS
        if why == "short":
            vllm.manager.prefill_rate.tokens_per_second = 10 * CHUNK + 1
        elif why == "too short to fetch":
            vllm.manager.tier_lookup._selection.min_tokens = 11 * CHUNK
        elif why == "alone":
            vllm.tier.peers_hold()
        elif why == "paused":
            vllm.tier.is_ready = False
        elif why == "switched off":
            vllm.tier.mirror.enabled = False
        elif why == "rate unknown":
            vllm.manager.prefill_rate.tokens_per_second = None
        else:
            vllm.tier.peers_hold(a=keys[:1])
        assert vllm.attempt(vllm.arrive("r", keys)) == 0
        assert vllm.tier.claims == []


class TestPrefillElsewhere:
    """The router gave the prompt to peer `a`, too, which begins in two seconds and then takes a
    second for each chunk."""

    KEYS = chunks("prompt", 10)

    @pytest.fixture
    def vllm(self) -> Scheduling:
        """An engine that does not know yet how fast it is."""
        vllm = Scheduling(step_tokens=2 * CHUNK)
        vllm.tier.peers_hold(a=[])
        return vllm

    def waiting(self, vllm: Scheduling) -> Request:
        request = vllm.arrive(
            with_mark("r", Elsewhere("a", 2.0, 10.0), SERVING.mark_key), self.KEYS
        )
        assert vllm.attempt(request) is None
        return request

    def test_it_waits_without_asking_the_tracker(self, vllm: Scheduling) -> None:
        self.waiting(vllm)
        assert vllm.tier.claims == []

    def test_chunks_are_fetched_as_they_are_computed(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        vllm.clock.now += 2.0
        for finished, found in ((4, None), (8, None), (10, 10)):
            vllm.clock.now += 4.0
            vllm.tier.peers_hold(a=self.KEYS[:finished])
            assert vllm.attempt(request) is None
            vllm.tier.end(vllm.tier.fetches[-1])
            assert vllm.attempt(request) == found
        vllm.schedule(request, 10)
        vllm.end_step()
        vllm.loaded(request, 10)
        vllm.finish(request)
        assert_nothing_left(vllm)
        assert vllm.tier.released == []

    def test_a_prefill_that_does_not_begin_is_given_up(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        vllm.clock.now += 2.0 + 0.25 + 2 * 2.0 + 2.5 - 0.01
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.02
        assert vllm.attempt(request) == 0
        assert vllm.manager.stats()["waits"]["given_up"] == 0  # until it is scheduled
        vllm.schedule(request, 0)
        assert vllm.manager.stats()["waits"]["given_up"] == 1

    def test_a_peer_that_leaves_is_not_waited_for(self, vllm: Scheduling) -> None:
        request = self.waiting(vllm)
        vllm.tier.peers_hold(b=[])
        assert vllm.attempt(request) == 0

    def test_nobody_waits_for_an_unknown_peer(self, vllm: Scheduling) -> None:
        name = with_mark("r", Elsewhere("nobody", 2.0, 10.0), SERVING.mark_key)
        assert vllm.attempt(vllm.arrive(name, self.KEYS)) == 0

    def test_an_id_that_a_client_made_up_is_only_an_id(self, vllm: Scheduling) -> None:
        name = with_mark("r", Elsewhere("a", 2.0, 10.0), "a guess")
        assert vllm.attempt(vllm.arrive(name, self.KEYS)) == 0

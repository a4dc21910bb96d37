"""A request waits for a peer that computes the same prompt, while that can pay."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.engine.scheduling import (
    CHUNK,
    FETCH_TIMEOUT,
    Request,
    Scheduling,
    assert_nothing_left,
    chunks,
)
from xinference_xavier.engine import idle
from xinference_xavier.engine.policy.donor_selection import FetchPolicy
from xinference_xavier.tiers.base import FetchState


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

        monkeypatch.setattr(idle, "_MAX_WAIT", 3600.0)
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

"""A request waits for a peer that computes the same prompt, as long as that can pay."""

from collections.abc import Callable

import pytest

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
from xinference_xavier.pool.pool import flush
from xinference_xavier.protocol.load import Elsewhere, with_mark
from xinference_xavier.protocol.tracker import Settings

KEYS = chunks("prompt", 10)


def fetch_computed(vllm: Scheduling, request: Request, computed: int) -> int | None:
    """The peer has computed so many chunks, and the request fetches them. Returns its hits."""
    vllm.tier.peers_hold(a=KEYS[:computed])
    assert vllm.attempt(request) is None
    vllm.tier.end(vllm.tier.fetches[-1])
    return vllm.attempt(request)


def set_rate(vllm: Scheduling, tokens_per_second: float | None) -> None:
    vllm.manager.prefill_rate.tokens_per_second = tokens_per_second


NO_REASONS_TO_ASK: dict[str, Callable[[Scheduling], object]] = {
    "short": lambda vllm: set_rate(vllm, 10 * CHUNK + 1),
    "rate unknown": lambda vllm: set_rate(vllm, None),
    "too short to fetch": lambda vllm: setattr(vllm.manager.selection, "min_tokens", 11 * CHUNK),
    "not worth fetching": lambda vllm: vllm.tier.peers_hold(a=KEYS[:1]),
    "alone": lambda vllm: vllm.tier.peers_hold(),
    "paused": lambda vllm: setattr(vllm.tier, "is_ready", False),
    "switched off": lambda vllm: vllm.tier.peers.follow(Settings(1, enabled=False)),
}


class TestOnePrefillPerCluster:
    """Two replicas get a cold prompt that takes ten seconds to compute, two chunks per step."""

    @pytest.fixture
    def vllm(self) -> Scheduling:
        return slow_engine()

    def asking(self, vllm: Scheduling) -> Request:
        request = vllm.arrive("r", KEYS)
        assert vllm.attempt(request) is None
        return request

    def test_the_tracker_is_asked_once(self, vllm: Scheduling) -> None:
        request = self.asking(vllm)
        assert vllm.attempt(request) is None
        (claim,) = vllm.tier.claims
        assert (claim.keys, claim.seconds) == (KEYS, 10.0)

    def test_only_missing_chunks_are_claimed(self, vllm: Scheduling) -> None:
        vllm.fill(KEYS[:4])
        self.asking(vllm)
        (claim,) = vllm.tier.claims
        assert (claim.keys, claim.seconds) == (KEYS[4:], 6.0)

    def test_what_only_a_slow_disk_has_is_waited_for(self, vllm: Scheduling) -> None:
        vllm.manager.selection.adaptive = True
        keys = chunks("other", 4)
        vllm.tier.peers_hold(disk=keys)
        vllm.fetch_and_finish(vllm.arrive("other", keys), 20.0)
        vllm.tier.peers_hold(disk=KEYS, a=[])
        request = waiting_for_prefill(vllm, KEYS)
        vllm.tier.peers_hold(disk=KEYS, a=KEYS[:4])
        assert vllm.attempt(request) is None
        assert [fetch.source for fetch in vllm.tier.fetches] == ["disk", "a"]

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
        waits = vllm.manager.stats()["waits"]
        assert waits == {"claimed": 1, "waited": 0, "given_up": 0}

    def test_a_request_without_an_answer_computes_after_a_second(self, vllm: Scheduling) -> None:
        request = self.asking(vllm)
        vllm.clock.now += 0.5
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.5
        assert vllm.attempt(request) == 0

    def test_a_request_that_ends_before_the_answer_releases_its_claim(
        self, vllm: Scheduling
    ) -> None:
        vllm.finish(self.asking(vllm))
        assert vllm.tier.released == vllm.tier.claims

    def test_a_waiting_request_fetches_chunks_as_they_are_finished(self, vllm: Scheduling) -> None:
        request = waiting_for_prefill(vllm, KEYS)
        for computed in (4, 8):
            vllm.clock.now += 4.0
            assert fetch_computed(vllm, request, computed) is None
            fetch = vllm.tier.fetches[-1]
            assert [row.key for row in fetch.rows] == KEYS[computed - 4 : computed]
            assert fetch.deadline == vllm.clock.now + FETCH_TIMEOUT
        vllm.clock.now += 2.0
        assert fetch_computed(vllm, request, 10) == 10
        vllm.load_and_finish(request, 10)
        assert_nothing_left(vllm)
        assert vllm.tier.released == []
        waits = vllm.manager.stats()["waits"]
        assert waits == {"claimed": 0, "waited": 1, "given_up": 0}

    @pytest.mark.parametrize(
        ("computed", "due"), [(0, 4 + 2.5), (4, 8 + 2.5), (5, 9 + 2.5), (6, 12.5), (9, 12.5)]
    )
    def test_the_peer_may_be_two_steps_and_a_quarter_of_the_whole_prefill_behind(
        self, vllm: Scheduling, computed: int, due: float
    ) -> None:
        request = waiting_for_prefill(vllm, KEYS)
        if computed:
            assert fetch_computed(vllm, request, computed) is None
        vllm.clock.now += due - 0.125
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.125
        assert vllm.attempt(request) == computed
        vllm.schedule(request, computed)
        assert vllm.manager.stats()["waits"]["given_up"] == 1

    def test_chunks_that_disappear_again_are_counted_as_computed(self, vllm: Scheduling) -> None:
        """The peer may have evicted them."""
        request = waiting_for_prefill(vllm, KEYS)
        assert fetch_computed(vllm, request, 5) is None
        flush(vllm.pool)
        vllm.tier.peers_hold(a=[])
        vllm.clock.now += 9 + 2.5 - 0.125
        assert vllm.attempt(request) is None

    def test_it_is_over_when_the_peer_has_computed_all_it_claimed(self, vllm: Scheduling) -> None:
        request = waiting_for_prefill(vllm, KEYS)
        vllm.tier.claims[0].held_by_peer = 6
        assert fetch_computed(vllm, request, 5) is None
        assert fetch_computed(vllm, request, 7) == 7

    def test_a_failed_fetch_ends_the_wait(self, vllm: Scheduling) -> None:
        request = waiting_for_prefill(vllm, KEYS)
        vllm.tier.peers_hold(a=KEYS[:4])
        assert vllm.attempt(request) is None
        vllm.tier.end(vllm.tier.fetches[-1], 2)
        assert vllm.attempt(request) == 2

    @pytest.mark.parametrize("end", ["pause", "reset"])
    def test_the_end_of_sharing_ends_the_wait(self, vllm: Scheduling, end: str) -> None:
        request = waiting_for_prefill(vllm, KEYS)
        if end == "pause":
            vllm.tier.is_ready = False
        else:
            vllm.manager.reset_cache()
        assert vllm.attempt(request) == 0

    def test_a_peer_that_is_slower_than_computing_ends_the_wait(self, vllm: Scheduling) -> None:
        vllm.manager.selection.adaptive = True
        for number in range(2):
            keys = chunks(f"other {number}", 4)
            vllm.tier.peers_hold(a=keys)
            vllm.fetch_and_finish(vllm.arrive(f"r{number}", keys), 20.0)
        vllm.tier.peers_hold(a=[])
        request = waiting_for_prefill(vllm, KEYS)
        vllm.tier.peers_hold(a=KEYS[:4])
        assert vllm.attempt(request) == 0

    @pytest.mark.parametrize("happen", NO_REASONS_TO_ASK.values(), ids=NO_REASONS_TO_ASK)
    def test_the_tracker_is_not_asked_if_waiting_cannot_pay(
        self, vllm: Scheduling, happen: Callable[[Scheduling], object]
    ) -> None:
        happen(vllm)
        assert vllm.attempt(vllm.arrive("r", KEYS)) == 0
        assert vllm.tier.claims == []


class TestPrefillElsewhere:
    """The router gave the prompt to peer `a`, too, which begins in two seconds and then takes a
    second for each chunk."""

    @pytest.fixture
    def vllm(self) -> Scheduling:
        """An engine that does not know yet how fast it is."""
        vllm = Scheduling(step_tokens=2 * CHUNK)
        vllm.tier.peers_hold(a=[])
        return vllm

    def marked(
        self, vllm: Scheduling, peer: str = "a", mark_key: str = SERVING.mark_key
    ) -> Request:
        return vllm.arrive(with_mark("r", Elsewhere(peer, 2.0, 10.0), mark_key), KEYS)

    def test_it_waits_and_fetches_without_asking_the_tracker(self, vllm: Scheduling) -> None:
        request = self.marked(vllm)
        assert vllm.attempt(request) is None
        vllm.clock.now += 2.0
        for computed, found in ((4, None), (8, None), (10, 10)):
            vllm.clock.now += 4.0
            assert fetch_computed(vllm, request, computed) == found
        vllm.load_and_finish(request, 10)
        assert_nothing_left(vllm)
        assert vllm.tier.claims == vllm.tier.released == []

    def test_a_prefill_that_does_not_begin_is_given_up(self, vllm: Scheduling) -> None:
        request = self.marked(vllm)
        assert vllm.attempt(request) is None
        vllm.clock.now += 2.0 + 0.25 + 2 * 2.0 + 2.5 - 0.01
        assert vllm.attempt(request) is None
        vllm.clock.now += 0.02
        assert vllm.attempt(request) == 0
        assert vllm.manager.stats()["waits"]["given_up"] == 0  # until it is scheduled
        vllm.schedule(request, 0)
        assert vllm.manager.stats()["waits"]["given_up"] == 1

    def test_a_peer_that_leaves_is_not_waited_for(self, vllm: Scheduling) -> None:
        request = self.marked(vllm)
        assert vllm.attempt(request) is None
        vllm.tier.peers_hold(b=[])
        assert vllm.attempt(request) == 0

    def test_nobody_waits_for_an_unknown_peer(self, vllm: Scheduling) -> None:
        assert vllm.attempt(self.marked(vllm, peer="nobody")) == 0

    def test_an_id_that_a_client_made_up_is_only_an_id(self, vllm: Scheduling) -> None:
        assert vllm.attempt(self.marked(vllm, mark_key="a guess")) == 0

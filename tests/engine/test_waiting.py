"""A request waits for a peer that computes the same prompt, as long as that can pay. An idle engine
waits for fetches, peers and loads; one that could do anything else does not."""

import threading
from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace
from typing import Any

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
from xinference_xavier.engine import waiting
from xinference_xavier.engine.waiting import Arrivals, Wait
from xinference_xavier.pool.pool import flush
from xinference_xavier.pool.tier import Claim, Fetch
from xinference_xavier.protocol.load import Elsewhere, with_mark

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
    "switched off": lambda vllm: setattr(vllm.tier.mirror, "enabled", False),
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

    def test_one_retry_defers_the_request(self, vllm: Scheduling) -> None:
        request = waiting_for_prefill(vllm, KEYS)
        answers = [vllm.manager.lookup(key, request.context) for key in KEYS]
        assert answers == [LookupResult.RETRY] + 9 * [LookupResult.MISS]

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


# -- an idle engine --------------------------------------------------------------------------------

PAUSE = pytest.approx(2.0 / 50)
"""A fiftieth of a step of two seconds."""


class Waits(Arrivals):
    """Records how long the engine would wait, and does what happens meanwhile."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def wait(self, ended: Callable[[float], object], seconds: float) -> None:
        self.seconds.append(seconds)
        self.meanwhile()

    def taken(self) -> float:
        seconds, self.seconds = sum(self.seconds), []
        return seconds


@pytest.fixture
def vllm(waits: Waits) -> Scheduling:
    return slow_engine(waits)


@pytest.fixture
def waits() -> Waits:
    return Waits()


def empty_step(vllm: Scheduling) -> None:
    """vLLM scheduled nothing in the attempt that just ended."""
    vllm.begin_step(0)
    vllm.manager.wait_if_idle()
    vllm.manager.steps.end(vllm.clock())


def fetching(vllm: Scheduling, name: str = "request", holder: str = "a") -> tuple[Fetch, Request]:
    keys = chunks(name, 10)
    vllm.tier.peers_hold(**{holder: keys})
    request = vllm.arrive(name, keys)
    assert vllm.attempt(request) is None
    return vllm.tier.fetches[-1], request


def test_an_engine_pauses_while_all_requests_wait_for_peers(vllm: Scheduling, waits: Waits) -> None:
    def paused() -> float:
        empty_step(vllm)
        return waits.taken()

    assert not paused()
    request = waiting_for_prefill(vllm, KEYS)
    assert paused() == PAUSE
    vllm.tier.peers_hold(a=KEYS[:4])
    vllm.attempt(request)
    assert paused() == waiting._MAX_WAIT, "rows are on their way"
    vllm.tier.end(vllm.tier.fetches[-1])
    vllm.attempt(request)
    assert paused() == PAUSE, "it waits for more"
    vllm.begin_step(100)
    vllm.attempt(request)
    assert not paused(), "the engine computes for others"
    vllm.manager.steps.end(vllm.clock())
    vllm.clock.now += 60.0
    assert vllm.attempt(request) == 4
    assert not paused(), "the request was scheduled"


@pytest.mark.parametrize("steps", [1, 2])
def test_an_idle_engine_looks_again_when_the_fetch_has_ended(
    vllm: Scheduling, waits: Waits, steps: int
) -> None:
    """In the step that begins the fetch, or before the lookups of a later one."""
    fetch, request = fetching(vllm)
    empty_step(vllm)
    if steps == 2:
        assert vllm.attempt(request) is None
        empty_step(vllm)
    waits.meanwhile = lambda: vllm.tier.end(fetch)
    assert vllm.attempt(request) == len(KEYS)


@pytest.mark.parametrize(("seconds", "pause"), [(2.0, 0.04), (0.1, 0.002), (9.0, 0.05)])
def test_it_looks_fifty_times_per_step_and_every_50_ms_at_least(
    seconds: float, pause: float
) -> None:
    wait = Wait(Claim(KEYS, 10.0), lambda _: seconds, 2, 1000.0)
    assert wait.pause == pytest.approx(pause)


def test_an_engine_does_not_wait_while_another_request_may_run(
    vllm: Scheduling, waits: Waits
) -> None:
    """One that vLLM has not looked up, because it has no blocks or prepares something else."""
    other = vllm.arrive("other", chunks("other", 2))
    _, request = fetching(vllm)
    for _ in range(2):
        empty_step(vllm)
        assert vllm.attempt(request) is None
    assert not waits.taken()
    vllm.finish(other)
    empty_step(vllm)
    assert vllm.attempt(request) is None
    assert waits.taken()


def test_a_request_that_came_between_two_steps_is_scheduled_at_once(
    vllm: Scheduling, waits: Waits
) -> None:
    _, request = fetching(vllm)
    empty_step(vllm)
    waits.taken()
    vllm.arrive("new", chunks("new", 2))
    assert vllm.attempt(request) is None
    assert not waits.taken()


def test_requests_behind_the_first_are_not_waited_for(vllm: Scheduling, waits: Waits) -> None:
    """The first may be scheduled, and its step would be held back."""
    fetch, first = fetching(vllm, "first")
    _, second = fetching(vllm, "second", holder="b")
    for request in (first, second):
        assert vllm.scan(request) is None
    vllm.end_step()
    empty_step(vllm)
    vllm.tier.end(fetch)
    waits.taken()
    assert vllm.scan(first) == 10
    assert vllm.scan(second) is None
    assert not waits.taken()


@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_with_loads_alone_lets_its_worker_wait(
    vllm: Scheduling, waits: Waits, alone: bool
) -> None:
    vllm.fill(KEYS)
    loading = vllm.arrive("loading", KEYS)
    if not alone:
        vllm.arrive("other", chunks("other", 2))
    hits = vllm.attempt(loading)
    assert hits == len(KEYS)
    _, request = fetching(vllm)
    assert not vllm.manager.wait_if_idle(), "the request may be scheduled"
    vllm.schedule(loading, hits)
    vllm.attempt(request)
    assert vllm.manager.wait_if_idle() == alone
    vllm.begin_step(100)
    assert not vllm.manager.wait_if_idle(), "the engine computes"
    assert not waits.taken()


def test_a_store_is_not_waited_for(vllm: Scheduling, waits: Waits) -> None:
    ended = vllm.arrive("ended", chunks("ended", 2))
    vllm.begin_store(ended, ended.keys)
    vllm.finish(ended)
    fetching(vllm)
    assert not vllm.manager.wait_if_idle()
    assert not waits.taken()


# -- arrivals ----------------------------------------------------------------------------------


@pytest.fixture
def slices() -> list[float]:
    """How long, in seconds, a wait was told to last at a time."""
    return []


def test_whatever_arrives_ends_the_wait(slices: list[float]) -> None:
    received: Queue[str] = Queue()

    def request_comes(seconds: float) -> None:
        slices.append(seconds)
        received.put("request")

    Arrivals(received).wait(request_comes, 3600.0)
    assert slices == [waiting._SLICE]
    Arrivals(received).wait(request_comes, 3600.0)
    assert len(slices) == 1, "it is still there"


def test_a_wait_ends_with_what_it_is_for() -> None:
    ended = threading.Event()
    ended.set()
    Arrivals(Queue()).wait(ended.wait, 3600.0)


def test_a_wait_ends_after_its_time(slices: list[float]) -> None:
    Arrivals(Queue()).wait(slices.append, 1e-6)
    assert all(0 < seconds <= 1e-6 for seconds in slices)


def test_where_arrivals_are_not_known_a_wait_is_as_short_as_vllm_s_own_pause(
    slices: list[float],
) -> None:
    Arrivals(None).wait(slices.append, 3600.0)
    assert slices == [waiting._SLICE]


def config(**parallel: int) -> Any:
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1, **parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes))


class Core:
    """vLLM's engine, which makes connectors while it is made itself."""

    def __init__(self) -> None:
        self.arrivals = Arrivals.at(config())


class CoreProc(Core):
    def __init__(self) -> None:
        self.input_queue: Queue[str] = Queue()
        super().__init__()


def test_the_engine_is_found_that_makes_the_connector() -> None:
    core = CoreProc()
    core.input_queue.put("request")
    assert core.arrivals is not None
    core.arrivals.wait(lambda _: pytest.fail("the request is there"), 3600.0)


def test_an_engine_in_its_caller_s_process_receives_nothing_by_itself() -> None:
    core = Core()
    assert core.arrivals is not None
    core.arrivals.wait(lambda _: None, 3600.0)


@pytest.mark.parametrize("ranks", ["pipeline_parallel_size", "data_parallel_size"])
def test_an_engine_that_others_compute_in_step_with_never_waits(ranks: str) -> None:
    arrivals = Arrivals.at(config(**{ranks: 2}))
    assert arrivals is None
    vllm = slow_engine(arrivals)
    fetch, request = fetching(vllm)
    fetch.ended = pytest.fail  # type: ignore[assignment]  # it has no `wait`
    empty_step(vllm)
    assert vllm.attempt(request) is None

"""An idle engine waits for fetches, peers and loads; one that could do anything else does not."""

import threading
from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.scheduling import (
    Request,
    Scheduling,
    chunks,
    slow_engine,
    waiting_for_prefill,
)
from xinference_xavier.engine import idle
from xinference_xavier.engine.idle import Arrivals
from xinference_xavier.replica.fetcher import Fetch

KEYS = chunks("prompt", 10)
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
    assert paused() == idle._MAX_WAIT, "rows are on their way"
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
    assert slices == [idle._SLICE]
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
    assert slices == [idle._SLICE]


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

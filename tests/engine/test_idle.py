"""An idle engine waits for a fetch; one that could do anything else does not."""

from collections.abc import Callable

import pytest

from tests.engine.scheduling import (
    Request,
    Scheduling,
    chunks,
    slow_engine,
    waiting_for_prefill,
)
from xinference_xavier.engine.idle import IdleWait
from xinference_xavier.replica.fetcher import Fetch

KEYS = chunks("prompt", 10)


class Waits:
    """Records the fetches that the engine would wait for, and does what happens meanwhile."""

    def __init__(self) -> None:
        self._fetches: list[Fetch] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def wait(self, fetch: Fetch) -> None:
        self._fetches.append(fetch)
        self.meanwhile()

    def taken(self) -> list[Fetch]:
        fetches, self._fetches = self._fetches, []
        return fetches


@pytest.fixture
def vllm() -> Scheduling:
    return slow_engine()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(IdleWait, "wait", lambda _, fetch: waits.wait(fetch))
    return waits


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


def test_an_engine_waits_for_the_fetch_that_all_requests_wait_for(
    vllm: Scheduling, waits: Waits
) -> None:
    def awaited() -> list[Fetch]:
        empty_step(vllm)
        return waits.taken()

    assert not awaited()
    request = waiting_for_prefill(vllm, KEYS)
    assert not awaited(), "vLLM pauses by itself"
    vllm.tier.peers_hold(a=KEYS[:4])
    vllm.attempt(request)
    assert awaited() == vllm.tier.fetches, "rows are on their way"
    vllm.tier.end(vllm.tier.fetches[-1])
    vllm.attempt(request)
    assert not awaited(), "it waits for more"


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


def test_an_engine_that_computes_does_not_wait(vllm: Scheduling, waits: Waits) -> None:
    fetching(vllm)
    vllm.begin_step(100)
    vllm.manager.wait_if_idle()
    assert not waits.taken()


def test_an_engine_that_copies_does_not_wait(vllm: Scheduling, waits: Waits) -> None:
    vllm.fill(KEYS)
    loading = vllm.arrive("loading", KEYS)
    vllm.schedule(loading, vllm.attempt(loading))
    _, request = fetching(vllm)
    empty_step(vllm)
    assert vllm.attempt(request) is None
    assert not waits.taken()


def test_a_store_is_not_waited_for(vllm: Scheduling, waits: Waits) -> None:
    ended = vllm.arrive("ended", chunks("ended", 2))
    vllm.begin_store(ended, ended.keys)
    vllm.finish(ended)
    fetching(vllm)
    empty_step(vllm)
    assert not waits.taken()


def test_an_engine_that_others_compute_in_step_with_never_waits(waits: Waits) -> None:
    vllm = slow_engine(alone=False)
    _, request = fetching(vllm)
    empty_step(vllm)
    assert vllm.attempt(request) is None
    assert not waits.taken()

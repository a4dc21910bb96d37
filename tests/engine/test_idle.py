"""An idle engine waits for fetches and peers; one that computes does not."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tests.engine.scheduling import (
    Request,
    Scheduling,
    chunks,
    slow_engine,
    waiting_for_prefill,
)
from xinference_xavier.engine import idle
from xinference_xavier.tiers.base import Fetch, FetchState

KEYS = chunks("prompt", 10)
PAUSE = pytest.approx(2.0 / 50)
"""A fiftieth of a step of two seconds."""


@pytest.fixture
def vllm() -> Scheduling:
    return slow_engine()


def fetching(vllm: Scheduling) -> tuple[Fetch, Request]:
    vllm.tier.peers_hold(a=KEYS)
    request = vllm.arrive("request", KEYS)
    assert vllm.attempt(request) is None
    (fetch,) = vllm.tier.fetches
    return fetch, request


def test_an_engine_pauses_while_all_requests_wait_for_peers(
    vllm: Scheduling, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(idle, "time", SimpleNamespace(sleep=slept.append))

    def paused() -> float:
        slept.clear()
        vllm.manager.step_begins(0, 0, 0.0)
        vllm.manager.step_ends()
        return sum(slept)

    assert not paused()
    request = waiting_for_prefill(vllm, KEYS)
    assert paused() == PAUSE
    vllm.tier.peers_hold(a=KEYS[:4])
    for _ in range(2):
        vllm.attempt(request)
        assert not paused(), "rows are on their way"
    vllm.tier.end(vllm.tier.fetches[-1])
    assert not paused(), "they arrived, and the request may be scheduled"
    vllm.attempt(request)
    assert paused() == PAUSE, "it waits for more"
    other = vllm.arrive("other", chunks("other", 2))
    vllm.attempt(request)
    begun = vllm.begin_store(other, other.keys)
    vllm.attempt(request)
    assert not paused(), "a store is under way"
    vllm.stored(other, begun)
    vllm.manager.step_begins(100, 0, 0.0)
    vllm.attempt(request)
    assert not paused(), "the engine computes for others"
    vllm.manager.step_ends()
    vllm.clock.now += 60.0
    assert vllm.attempt(request) == 4
    assert not paused(), "the request was scheduled"


@pytest.mark.parametrize("steps", [1, 2])
def test_an_idle_engine_looks_again_when_the_fetch_has_ended(
    vllm: Scheduling, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """In the step that begins the fetch, or at the lookup in a later one."""

    class Ending(threading.Event):
        """Ends the fetch when somebody waits for it."""

        def wait(self, timeout: float | None = None) -> bool:
            vllm.tier.end(fetch)
            return super().wait(timeout)

    monkeypatch.setattr(idle, "_MAX_WAIT", 3600.0)
    fetch, request = fetching(vllm)
    if steps == 2:
        assert vllm.attempt(request) is None
    fetch.ended = Ending()
    vllm.manager.step_begins(0, 0, 0.0)
    assert (fetch.state is FetchState.PENDING) == (steps == 2)
    assert vllm.attempt(request) == len(KEYS)


def test_an_engine_that_computes_does_not_wait(vllm: Scheduling) -> None:
    class Busy(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise AssertionError("the engine computes for others")

    fetch, request = fetching(vllm)
    vllm.manager.step_begins(0, 0, 0.0)
    vllm.end_step()  # something was scheduled
    fetch.ended = Busy()
    assert vllm.attempt(request) is None

"""The longest wait for a decision counts what the request lost to us, not what it would have waited
for the engine anyway."""

from __future__ import annotations

import pytest

from tests.engine.scheduling import FETCH_TIMEOUT, Scheduling, chunks
from xinference_xavier.engine.decision_time import DecisionTime


def test_idle_passes_count() -> None:
    time = DecisionTime()
    since = time.idle_time(10.0)
    for now in (10.0, 10.1, 10.2):
        time.step_begins(0, now)
    time.decided(since, 10.3)
    assert time.longest == pytest.approx(0.3)


def test_a_step_that_computes_others_does_not_count() -> None:
    time = DecisionTime()
    since = time.idle_time(10.0)
    time.step_begins(512, 10.0)
    time.decided(since, 14.0)
    assert time.longest == 0.0
    time.step_begins(0, 15.0)  # 1 s without a step
    time.decided(since, 15.0)
    assert time.longest == pytest.approx(1.0)


def test_nor_does_an_empty_step_that_waits_for_the_one_before() -> None:
    """The next step is scheduled while a step is still being computed."""
    time = DecisionTime()
    since = time.idle_time(10.0)
    time.step_begins(512, 10.0)
    time.step_begins(0, 10.01)
    time.step_begins(0, 13.0)
    time.decided(since, 13.1)
    assert time.longest == pytest.approx(0.1)


def test_a_request_is_timed_from_its_first_pending_lookup_to_its_decision() -> None:
    vllm = Scheduling()
    keys = chunks("prompt", 6)
    vllm.replica.peers_hold(a=keys)
    request = vllm.arrive("r", keys)
    vllm.clock.now += 3.0  # it arrived earlier than it was looked at
    assert vllm.attempt(request) is None
    vllm.clock.now += FETCH_TIMEOUT
    assert vllm.attempt(request) == 0
    vllm.clock.now += 3.0  # no room yet
    assert vllm.attempt(request) == 0
    assert vllm.manager.stats()["longest_decision_s"] == pytest.approx(FETCH_TIMEOUT)

"""A request waits for a peer that computes its prefix, as long as the peer keeps up."""

from __future__ import annotations

import pytest

from xinference_xavier.engine.waiting import Wait, WaitCounts
from xinference_xavier.pool.tier import Claim

KEYS = [bytes([number]) for number in range(100)]
CHUNK = 0.1
"""Seconds; 10 s for all."""
BEGAN = 1000.0
STEP = 10
"""Chunks."""
SLACK = 0.25 * 10.0


def local_seconds(chunks: int) -> float:
    return chunks * CHUNK


def waiting(held_by_peer: int | None = 100) -> Wait:
    claim = Claim(KEYS, 100 * CHUNK)
    claim.held_by_peer = held_by_peer
    return Wait(claim, local_seconds, STEP, BEGAN)


def goes_on(wait: Wait, computed: int, seconds: float) -> bool:
    return wait.goes_on(set(KEYS[:computed]).__contains__, BEGAN + seconds)


def test_a_request_does_not_wait_for_its_own_claim() -> None:
    assert not goes_on(waiting(held_by_peer=0), 0, 0.0)


def test_an_answer_must_come_within_a_second() -> None:
    assert goes_on(waiting(None), 0, 0.9)
    assert not goes_on(waiting(None), 0, 1.0)


@pytest.mark.parametrize("computed", [0, 10, 50, 79])
def test_the_peer_may_be_two_steps_and_a_quarter_behind(computed: int) -> None:
    due = local_seconds(computed + 2 * STEP) + SLACK
    assert goes_on(waiting(), computed, due - 0.01)
    assert not goes_on(waiting(), computed, due)


@pytest.mark.parametrize("computed", [80, 99])
def test_a_wait_lasts_at_most_the_whole_prefill_and_a_quarter(computed: int) -> None:
    assert goes_on(waiting(), computed, 12.49)
    assert not goes_on(waiting(), computed, 12.5)


def test_it_is_over_when_the_peer_has_computed_all_it_claimed() -> None:
    wait = waiting(held_by_peer=60)
    assert goes_on(wait, 59, 0.5)
    assert not goes_on(wait, 60, 0.5)


def test_a_chunk_counts_even_if_it_disappears() -> None:
    """The peer may have evicted it."""
    wait = waiting()
    assert goes_on(wait, 50, 5.0)
    assert goes_on(wait, 0, local_seconds(70) + SLACK - 0.01)


def test_its_end_is_counted_once() -> None:
    counts = WaitCounts()
    waits = [waiting(held_by_peer=0), waiting(held_by_peer=None), waiting(), waiting()]
    for wait, computed in zip(waits, [0, 0, 100, 5], strict=True):
        goes_on(wait, computed, 6.0)
        wait.count(counts, BEGAN + 6.0)
        wait.count(counts, BEGAN + 9.0)
    assert counts == WaitCounts(claimed=2, waited=2, given_up=1, seconds=12.0)


@pytest.mark.parametrize(("step", "pause"), [(10, 0.02), (1, 0.002), (90, 0.05)])
def test_an_idle_engine_looks_fifty_times_per_step(step: int, pause: float) -> None:
    assert Wait(Claim(KEYS, 10.0), local_seconds, step, BEGAN).pause == pytest.approx(pause)

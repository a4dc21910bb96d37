"""A manager with the adaptive policy fetches only what pays, from the donors that are fastest."""

from __future__ import annotations

from typing import cast

import pytest

from tests.engine.scheduling import Request, Scheduling, chunks
from xinference_xavier.engine.policy.cost_model import RETRY_AFTER
from xinference_xavier.engine.policy.donor_selection import FetchPolicy

PREFILL = 1000.0
"""Tokens per second; a chunk takes 0.128 s."""


class Engine(Scheduling):
    """Has a pool of 512 rows and computes a chunk in 0.128 s."""

    def __init__(self) -> None:
        super().__init__(slots=512, policy=FetchPolicy.ADAPTIVE)
        self.manager.prefill_rate.tokens_per_second = PREFILL
        self._prompts = 0

    def request(self, count: int, peers: str = "a") -> Request:
        """For `count` new chunks, all of which each of `peers` holds."""
        self._prompts += 1
        keys = chunks(f"prompt {self._prompts}", count)
        self.tier.peers_hold(**dict.fromkeys(peers, keys))
        return self.arrive(f"request {self._prompts}", keys)

    def learn(self, overhead: float, per_row: float, peer: str = "a") -> None:
        self.manager.tier_lookup._selection.policy = FetchPolicy.FIXED_THRESHOLD
        for count in (4, 4, 40, 10, 40):
            request = self.request(count, peer)
            assert self.attempt(request) is None
            fetch = self.tier.fetches[-1]
            fetch.transport = "gloo"
            self.tier.end(fetch, seconds=overhead + per_row * count)
            assert self.attempt(request) == count
            self.finish(request)
            self.end_step()
        self.manager.tier_lookup._selection.policy = FetchPolicy.ADAPTIVE

    def steps(self, seconds: dict[int, float]) -> None:
        """Compute 1,000 tokens per step; `seconds` is the duration by depth."""
        for depth, took in [*seconds.items()] * 5:
            self.manager.step_begins(1000, 1000, depth)
            self.clock.now += took
            self.manager.step_ends()

    @property
    def decisions(self) -> dict[str, float]:
        return cast(dict[str, float], self.manager.stats()["fetch_decisions"])


def test_chunks_that_are_faster_to_compute_are_computed() -> None:
    vllm = Engine()
    vllm.learn(0.55, 0.028)
    request = vllm.request(5)
    for _ in range(3):
        assert vllm.attempt(request) == 0, "at once"
    assert vllm.decisions["computed"] == 1
    assert vllm.attempt(vllm.request(6)) is None
    assert (vllm.decisions["computed"], vllm.decisions["fetched"]) == (1, 6)


def test_only_chunks_that_arrive_in_time_are_fetched() -> None:
    vllm = Engine()
    vllm.learn(0.0, 0.1)
    assert vllm.attempt(vllm.request(80)) is None
    assert len(vllm.tier.fetches[-1].rows) == pytest.approx(50, abs=2)


def test_a_slow_peer_is_tried_again_after_a_while() -> None:
    vllm = Engine()
    vllm.learn(0.0, 1.0)
    assert vllm.attempt(vllm.request(20)) == 0
    vllm.clock.now += RETRY_AFTER + 1
    assert vllm.attempt(vllm.request(20)) is None
    assert vllm.attempt(vllm.request(20)) == 0, "one at a time"


def test_a_fixed_threshold_replaces_the_cost_model() -> None:
    vllm = Engine()
    vllm.learn(0.0, 1.0)
    vllm.manager.tier_lookup._selection.policy = FetchPolicy.FIXED_THRESHOLD
    assert vllm.attempt(vllm.request(2)) is None
    assert vllm.attempt(vllm.request(1)) == 0
    assert vllm.decisions["computed"] == 0


def test_deep_chunks_are_fetched_where_shallow_ones_are_computed() -> None:
    vllm = Engine()
    vllm.learn(0.55, 0.1)
    vllm.steps({0: 1.0, 10_000: 2.0})
    assert vllm.attempt(vllm.request(10)) == 0
    keys = chunks("long prompt", 60)
    vllm.fill(keys[:50])
    vllm.tier.peers_hold(a=keys)
    assert vllm.attempt(vllm.arrive("deep", keys)) is None
    assert len(vllm.tier.fetches[-1].rows) == 10


def test_a_short_gap_before_chunks_of_the_pool_is_worth_a_fetch() -> None:
    """The head was a copy and evicted first; the tail stayed."""
    vllm = Engine()
    keys = chunks("prompt", 6)
    vllm.fill(keys[1:])
    vllm.tier.peers_hold(a=keys[:1])
    request = vllm.arrive("r", keys)
    assert vllm.attempt(request) is None
    vllm.tier.end(vllm.tier.fetches[-1])
    assert vllm.attempt(request) == 6


def rows_by_donor(vllm: Engine, request: Request) -> dict[str, int]:
    """How many rows the request fetches from each donor."""
    before = len(vllm.tier.fetches)
    assert vllm.attempt(request) is None
    return {fetch.source: len(fetch.rows) for fetch in vllm.tier.fetches[before:]}


class TestSeveralDonors:
    def test_divide_a_long_fetch(self) -> None:
        vllm = Engine()
        for peer in "abc":
            vllm.learn(0.01, 0.01, peer)
        vllm.clock.now += RETRY_AFTER + 1
        before = vllm.decisions["fetched"]
        assert rows_by_donor(vllm, vllm.request(40, "ab")) == {"a": 20, "b": 20}
        assert vllm.decisions["fetched"] == before + 1
        for fetch in vllm.tier.fetches[-2:]:
            fetch.transport = "gloo"
            vllm.tier.end(fetch, seconds=0.21)
        vllm.end_step()
        assert sorted(rows_by_donor(vllm, vllm.request(40, "abc")).values()) == [13, 13, 14]

    def test_do_not_divide_a_fetch_that_is_mostly_overhead(self) -> None:
        vllm = Engine()
        for peer in "ab":
            vllm.learn(1.0, 0.01, peer)
        assert len(rows_by_donor(vllm, vllm.request(40, "ab"))) == 1

    def test_do_without_a_slow_or_busy_one(self) -> None:
        vllm = Engine()
        for peer, per_row in {"a": 0.01, "b": 0.02, "c": 0.01}.items():
            vllm.learn(0.0, per_row, peer)
        assert rows_by_donor(vllm, vllm.request(40, "ab")) == {"a": 40}
        assert rows_by_donor(vllm, vllm.request(40, "ac")) == {"c": 40}, "a is busy"

    def test_are_tried_alone_before_they_divide_a_fetch(self) -> None:
        vllm = Engine()
        vllm.learn(0.0, 0.01, "a")
        assert rows_by_donor(vllm, vllm.request(40, "ab")) == {"b": 40}

    def test_that_are_no_faster_together_seldom_divide_a_fetch(self) -> None:
        """The consumer's own link or memory is the bottleneck."""
        vllm = Engine()
        for peer in "ab":
            vllm.learn(0.01, 0.01, peer)
        divided = []
        for _ in range(50):
            request = vllm.request(40, "ab")
            divided.append(len(rows_by_donor(vllm, request)) > 1)
            for fetch in vllm.tier.fetches[-2:] if divided[-1] else vllm.tier.fetches[-1:]:
                fetch.transport = "gloo"
                vllm.tier.end(fetch, seconds=0.41)
            assert vllm.attempt(request) == 40
            vllm.finish(request)
            vllm.end_step()
        assert divided[0]
        assert sum(divided[20:]) < 10

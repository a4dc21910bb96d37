"""A manager that chooses, asked for what peers hold."""

from __future__ import annotations

from typing import cast

import pytest

from tests.engine.scheduling import Request, Scheduling, chunks
from xinference_xavier.engine.policy.cost_model import BELIEVED

PREFILL = 1000.0
"""Tokens per second: a chunk takes 0.128 s."""


class Engine(Scheduling):
    """A manager that chooses, over a pool of 512 rows; computes a chunk in 0.128 s."""

    def __init__(self) -> None:
        super().__init__(slots=512, choose=True)
        self.manager.prefill_rate.tokens_per_second = PREFILL
        self._prompts = 0

    def ask(self, count: int, peers: str = "a") -> Request:
        """For chunks that these peers hold, each of them all."""
        self._prompts += 1
        keys = chunks(f"prompt {self._prompts}", count)
        self.replica.peers_hold(**dict.fromkeys(peers, keys))
        return self.arrive(f"request {self._prompts}", keys)

    def learn(self, overhead: float, each: float, peer: str = "a") -> None:
        self.manager._sources.choose = False
        for count in (4, 4, 40, 10, 40):
            request = self.ask(count, peer)
            assert self.attempt(request) is None
            fetch = self.replica.fetches[-1]
            fetch.transport = "gloo"
            self.replica.end(fetch, seconds=overhead + each * count)
            assert self.attempt(request) == count
            self.finish(request)
            self.end_step()
        self.manager._sources.choose = True

    def steps(self, seconds: dict[int, float]) -> None:
        """Of 1,000 tokens each, that took so long with so many before them."""
        for depth, took in [*seconds.items()] * 5:
            self.manager.step_begins(1000, 1000, depth)
            self.clock.now += took
            self.manager.step_ends()

    @property
    def choices(self) -> dict[str, float]:
        return cast(dict[str, float], self.manager.stats()["cost_model"])


def test_it_computes_what_is_quicker_computed() -> None:
    vllm = Engine()
    vllm.learn(0.55, 0.028)
    request = vllm.ask(5)
    for _ in range(3):
        assert vllm.attempt(request) == 0, "at once"
    assert vllm.choices["computed"] == 1
    assert vllm.attempt(vllm.ask(6)) is None
    assert (vllm.choices["computed"], vllm.choices["fetched"]) == (1, 6)


def test_it_fetches_what_arrives_in_time() -> None:
    vllm = Engine()
    vllm.learn(0.0, 0.1)
    assert vllm.attempt(vllm.ask(80)) is None
    assert len(vllm.replica.fetches[-1].rows) == pytest.approx(50, abs=2)


def test_it_tries_again_after_a_while() -> None:
    vllm = Engine()
    vllm.learn(0.0, 1.0)
    assert vllm.attempt(vllm.ask(20)) == 0
    vllm.clock.now += BELIEVED + 1
    assert vllm.attempt(vllm.ask(20)) is None
    assert vllm.attempt(vllm.ask(20)) == 0, "one at a time"


def test_it_does_not_ask_where_the_user_has_said_it() -> None:
    vllm = Engine()
    vllm.learn(0.0, 1.0)
    vllm.manager._sources.choose = False
    assert vllm.attempt(vllm.ask(2)) is None
    assert vllm.attempt(vllm.ask(1)) == 0
    assert vllm.choices["computed"] == 0


def test_it_fetches_deep_in_a_prompt_what_it_computes_at_its_start() -> None:
    vllm = Engine()
    vllm.learn(0.55, 0.1)
    vllm.steps({0: 1.0, 10_000: 2.0})
    assert vllm.attempt(vllm.ask(10)) == 0
    keys = chunks("long prompt", 60)
    vllm.fill(keys[:50])
    vllm.replica.peers_hold(a=keys)
    assert vllm.attempt(vllm.arrive("deep", keys)) is None
    assert len(vllm.replica.fetches[-1].rows) == 10


def test_a_short_gap_before_what_is_here_is_worth_a_fetch() -> None:
    """Its tail can have stayed where the head, a copy, was given up."""
    vllm = Engine()
    keys = chunks("prompt", 6)
    vllm.fill(keys[1:])
    vllm.replica.peers_hold(a=keys[:1])
    request = vllm.arrive("r", keys)
    assert vllm.attempt(request) is None
    vllm.replica.end(vllm.replica.fetches[-1])
    assert vllm.attempt(request) == 6


def of_each_donor(vllm: Engine, request: Request) -> dict[str, int]:
    """How many rows the request fetches from whom."""
    before = len(vllm.replica.fetches)
    assert vllm.attempt(request) is None
    return {fetch.donor: len(fetch.rows) for fetch in vllm.replica.fetches[before:]}


class TestSeveralDonors:
    def test_share_what_each_would_take_long_for(self) -> None:
        vllm = Engine()
        for peer in "abc":
            vllm.learn(0.01, 0.01, peer)
        vllm.clock.now += BELIEVED + 1
        before = vllm.choices["fetched"]
        assert of_each_donor(vllm, vllm.ask(40, "ab")) == {"a": 20, "b": 20}
        assert vllm.choices["fetched"] == before + 1
        for fetch in vllm.replica.fetches[-2:]:
            fetch.transport = "gloo"
            vllm.replica.end(fetch, seconds=0.21)
        vllm.end_step()
        assert sorted(of_each_donor(vllm, vllm.ask(40, "abc")).values()) == [13, 13, 14]

    def test_are_not_troubled_for_what_is_mostly_messages(self) -> None:
        vllm = Engine()
        for peer in "ab":
            vllm.learn(1.0, 0.01, peer)
        assert len(of_each_donor(vllm, vllm.ask(40, "ab"))) == 1

    def test_one_that_is_slow_or_busy_is_left_out(self) -> None:
        vllm = Engine()
        for peer, each in {"a": 0.01, "b": 0.02, "c": 0.01}.items():
            vllm.learn(0.0, each, peer)
        assert of_each_donor(vllm, vllm.ask(40, "ab")) == {"a": 40}
        assert of_each_donor(vllm, vllm.ask(40, "ac")) == {"c": 40}, "a has the other fetch to do"

    def test_of_which_one_is_not_known_are_learnt_first(self) -> None:
        vllm = Engine()
        vllm.learn(0.0, 0.01, "a")
        assert of_each_donor(vllm, vllm.ask(40, "ab")) == {"b": 40}

    def test_that_are_no_quicker_together_are_seldom_asked_together(self) -> None:
        """The consumer's own link or memory is what limits them."""
        vllm = Engine()
        for peer in "ab":
            vllm.learn(0.01, 0.01, peer)
        divided = []
        for _ in range(50):
            request = vllm.ask(40, "ab")
            divided.append(len(of_each_donor(vllm, request)) > 1)
            for fetch in vllm.replica.fetches[-2:] if divided[-1] else vllm.replica.fetches[-1:]:
                fetch.transport = "gloo"
                vllm.replica.end(fetch, seconds=0.41)
            assert vllm.attempt(request) == 40
            vllm.finish(request)
            vllm.end_step()
        assert divided[0]
        assert sum(divided[20:]) < 10

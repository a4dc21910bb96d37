"""Fetching is preferred until it was seen to be slower, and again after a while."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from tests.engine.scheduling import CHUNK, ROW_BYTES, Request, Scheduling, chunks
from xinference_xavier.engine.fetch_rate import NEVER
from xinference_xavier.engine.forecast import BELIEVED, Forecast
from xinference_xavier.pool.pool import Row
from xinference_xavier.transfer.fetch import Fetch

PREFILL = 1000.0
"""Tokens per second."""
EACH = CHUNK / PREFILL
"""Seconds that a chunk takes: 0.128."""


class Peer:
    """What there is to know of fetches from one peer, `a`; one begins every second."""

    def __init__(self) -> None:
        self.forecast = Forecast(row_bytes=ROW_BYTES)
        self.now = 1000.0

    def fetch(
        self, rows: int, seconds: float, *, came: int | None = None, transport: str = "gloo"
    ) -> None:
        fetch = Fetch("a", [Row(b"", 0)] * rows, deadline=0.0)
        self.now += 1.0
        self.forecast.begun(fetch, rows * EACH, self.now)
        fetch.committed = fetch.rows[: rows if came is None else came]
        fetch.seconds, fetch.transport = seconds, transport
        self.forecast.ended(fetch)
        self.forecast.ended(fetch)

    def learn(self, overhead: float, each: float) -> None:
        for rows in (4, 4, 40, 10, 80, 4, 40):
            self.fetch(rows, overhead + each * rows)

    def least(self) -> int:
        return self.forecast.least("a", 1, EACH, self.now)


def test_nothing_known_speaks_for_fetching() -> None:
    peer = Peer()
    assert peer.least() == 1
    assert peer.forecast.rows_within("a", 0.001, peer.now) == NEVER
    peer.learn(100.0, 1.0)
    assert peer.forecast.least("a", 1, None, peer.now) == 1, "nor does a prefill not yet measured"
    assert peer.forecast.least("b", 1, EACH, peer.now) == 1, "nor one from another peer"


def test_what_is_worth_a_fetch_follows_from_both_rates() -> None:
    peer = Peer()
    peer.learn(0.55, 0.028)  # saves 0.1 s a chunk
    assert peer.least() == 6
    assert peer.forecast.least("a", 1, EACH * 2, peer.now) == 3
    assert peer.forecast.least("a", 1, EACH / 10, peer.now) == NEVER


def test_the_first_fetch_which_opens_the_link_does_not_count() -> None:
    peer = Peer()
    peer.fetch(2, 60.0)
    assert peer.least() == 1
    peer.learn(0.55, 0.028)
    assert peer.least() == 6


def test_each_transport_has_its_rate_and_the_last_one_counts() -> None:
    peer = Peer()
    peer.learn(0.55, 0.028)
    peer.fetch(4, 60.0, transport="shared_memory")
    assert peer.least() == 1
    peer.fetch(4, 0.662)
    assert peer.least() == 6


def test_what_brought_nothing_measures_nothing() -> None:
    peer = Peer()
    peer.learn(0.55, 0.028)
    peer.fetch(10, 5.0, came=0)
    assert peer.least() == 6


def test_what_was_slow_for_a_while_is_tried_again_and_then_forgotten() -> None:
    peer = Peer()
    peer.learn(1.0, 1.0)
    assert peer.least() == NEVER
    peer.now += BELIEVED
    assert peer.least() == NEVER
    peer.now += 1.0
    assert peer.least() == 1, "one is made all the same"
    fetch = Fetch("a", [Row(b"", 0)] * 10, deadline=0.0)
    peer.forecast.begun(fetch, 10 * EACH, peer.now)
    assert peer.least() == NEVER, "but no second one before it has ended"
    fetch.committed, fetch.seconds, fetch.transport = fetch.rows, 0.1, "gloo"
    peer.forecast.ended(fetch)
    assert peer.least() == 1
    peer.now += BELIEVED / 2
    assert peer.forecast.rows_within("a", 0.05, peer.now) == 5


def test_what_is_still_slow_is_computed_again() -> None:
    peer = Peer()
    peer.learn(1.0, 1.0)
    peer.now += BELIEVED + 1
    assert peer.least() == 1
    peer.fetch(10, 11.0)
    assert peer.least() > 10


def test_how_good_the_forecast_was() -> None:
    peer = Peer()
    peer.learn(0.0, 0.1)
    choices = peer.forecast.choices
    before = replace(choices)
    peer.fetch(20, 3.0)
    assert choices.forecasts == before.forecasts + 1 == 6, "the first two had none"
    assert choices.error_s - before.error_s == pytest.approx(1.0)
    assert choices.expected_s - before.expected_s == pytest.approx(2.0)
    assert choices.took_s - before.took_s == pytest.approx(3.0)
    assert (before.lost, choices.lost) == (0, 1), "computing takes 2.56 s"
    assert choices.fetched == 8
    report = peer.forecast.report()
    assert report["fetched"] == 8
    assert report["rates"]["a"]["transport"] == "gloo"
    assert report["rates"]["a"]["bytes_per_s"] > 0


def test_not_more_peers_are_known_than_there_may_be() -> None:
    forecast = Forecast(row_bytes=ROW_BYTES)
    for number in range(1000):
        fetch = Fetch(f"peer {number}", [Row(b"", 0)], deadline=0.0)
        forecast.begun(fetch, EACH, float(number))
        forecast.ended(fetch)
    assert len(forecast._peers) <= 100
    assert not forecast._begun


class Engine(Scheduling):
    """A manager that chooses, over a pool of 512 rows; computes a chunk in 0.128 s."""

    def __init__(self) -> None:
        super().__init__(slots=512, choose=True)
        self.manager.prefill_rate.tokens_per_second = PREFILL
        self._prompts = 0

    def ask(self, count: int) -> Request:
        """For chunks that the peer `a` holds."""
        self._prompts += 1
        keys = chunks(f"prompt {self._prompts}", count)
        self.replica.peers_hold(a=keys)
        return self.arrive(f"request {self._prompts}", keys)

    def learn(self, overhead: float, each: float) -> None:
        self.manager._sources.choose = False
        for count in (4, 4, 40, 10, 40):
            request = self.ask(count)
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
            self.manager.prefill_rate.step_begins(1000, self.clock.now, depth)
            self.clock.now += took
            self.manager.prefill_rate.step_ends(self.clock.now)

    @property
    def choices(self) -> dict[str, float]:
        return cast(dict[str, float], self.manager.stats()["forecast"])


class TestManager:
    def test_computes_what_is_quicker_computed(self) -> None:
        vllm = Engine()
        vllm.learn(0.55, 0.028)
        request = vllm.ask(5)
        for _ in range(3):
            assert vllm.attempt(request) == 0, "at once"
        assert vllm.choices["computed"] == 1
        assert vllm.attempt(vllm.ask(6)) is None
        assert (vllm.choices["computed"], vllm.choices["fetched"]) == (1, 6)

    def test_fetches_what_arrives_in_time(self) -> None:
        vllm = Engine()
        vllm.learn(0.0, 0.1)
        assert vllm.attempt(vllm.ask(80)) is None
        assert len(vllm.replica.fetches[-1].rows) == pytest.approx(50, abs=2)

    def test_tries_again_after_a_while(self) -> None:
        vllm = Engine()
        vllm.learn(0.0, 1.0)
        assert vllm.attempt(vllm.ask(20)) == 0
        vllm.clock.now += BELIEVED + 1
        assert vllm.attempt(vllm.ask(20)) is None
        assert vllm.attempt(vllm.ask(20)) == 0, "one at a time"

    def test_does_not_ask_where_the_user_has_said_it(self) -> None:
        vllm = Engine()
        vllm.learn(0.0, 1.0)
        vllm.manager._sources.choose = False
        assert vllm.attempt(vllm.ask(2)) is None
        assert vllm.attempt(vllm.ask(1)) == 0
        assert vllm.choices["computed"] == 0

    def test_fetches_deep_in_a_prompt_what_it_computes_at_its_start(self) -> None:
        vllm = Engine()
        vllm.learn(0.55, 0.1)
        vllm.steps({0: 1.0, 10_000: 2.0})
        assert vllm.attempt(vllm.ask(10)) == 0
        keys = chunks("long prompt", 60)
        vllm.fill(keys[:50])
        vllm.replica.peers_hold(a=keys)
        assert vllm.attempt(vllm.arrive("deep", keys)) is None
        assert len(vllm.replica.fetches[-1].rows) == 10

    def test_a_short_gap_before_what_is_here_is_worth_a_fetch(self) -> None:
        """Its tail can have stayed where the head, a copy, was given up."""
        vllm = Engine()
        keys = chunks("prompt", 6)
        vllm.fill(keys[1:])
        vllm.replica.peers_hold(a=keys[:1])
        request = vllm.arrive("r", keys)
        assert vllm.attempt(request) is None
        vllm.replica.end(vllm.replica.fetches[-1])
        assert vllm.attempt(request) == 6

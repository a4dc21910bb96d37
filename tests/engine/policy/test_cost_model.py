"""Fetching is preferred until it was seen to be slower, and again after a while."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.scheduling import CHUNK, ROW_BYTES
from xinference_xavier.engine.policy.cost_model import BELIEVED, CostModel
from xinference_xavier.engine.policy.fetch_rate import NEVER
from xinference_xavier.pool.pool import Row
from xinference_xavier.replica.fetcher import Fetch

PREFILL = 1000.0
"""Tokens per second."""
EACH = CHUNK / PREFILL
"""Seconds that a chunk takes: 0.128."""


class Peer:
    """What there is to know of fetches from one peer, `a`; one begins every second."""

    def __init__(self) -> None:
        self.forecast = CostModel(row_bytes=ROW_BYTES)
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
    assert choices.predictions == before.predictions + 1 == 6, "the first two had none"
    assert choices.error_s - before.error_s == pytest.approx(1.0)
    assert choices.predicted_s - before.predicted_s == pytest.approx(2.0)
    assert choices.took_s - before.took_s == pytest.approx(3.0)
    assert (before.slower_than_prefill, choices.slower_than_prefill) == (0, 1), (
        "computing takes 2.56 s"
    )
    report = peer.forecast.report()
    assert report["predictions"] == 6
    assert report["rates"]["a"]["transport"] == "gloo"
    assert report["rates"]["a"]["bytes_per_s"] > 0


def test_not_more_peers_are_known_than_there_may_be() -> None:
    forecast = CostModel(row_bytes=ROW_BYTES)
    for number in range(1000):
        fetch = Fetch(f"peer {number}", [Row(b"", 0)], deadline=0.0)
        forecast.begun(fetch, EACH, float(number))
        forecast.ended(fetch)
    assert len(forecast._peers) <= 100
    assert not forecast._begun

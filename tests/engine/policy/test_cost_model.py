"""Fetching is preferred until it was measured to be slower, and tried again after a while."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.scheduling import CHUNK, ROW_BYTES
from xinference_xavier.engine.policy.cost_model import RETRY_AFTER, CostModel
from xinference_xavier.engine.policy.fetch_rate import INFINITE
from xinference_xavier.pool.pool import Row
from xinference_xavier.tiers.base import Fetch

PREFILL = 1000.0
"""Tokens per second."""
CHUNK_SECONDS = CHUNK / PREFILL
"""0.128, to compute one."""
NEVER = 1 << 30


class Peer:
    """Fetches from the peer `a`; one begins every second."""

    def __init__(self) -> None:
        self.cost_model = CostModel(row_bytes=ROW_BYTES)
        self.now = 1000.0

    def fetch(
        self, rows: int, seconds: float, *, arrived: int | None = None, transport: str = "gloo"
    ) -> None:
        fetch = Fetch("a", [Row(b"", 0)] * rows, deadline=0.0)
        self.now += 1.0
        self.cost_model.begun(fetch, rows * CHUNK_SECONDS, self.now)
        fetch.committed = fetch.rows[: rows if arrived is None else arrived]
        fetch.seconds, fetch.transport = seconds, transport
        self.cost_model.ended(fetch)
        self.cost_model.ended(fetch)

    def learn(self, overhead: float, per_row: float) -> None:
        for rows in (4, 4, 40, 10, 80, 4, 40):
            self.fetch(rows, overhead + per_row * rows)

    def min_chunks(self, chunk_seconds: float = CHUNK_SECONDS, peer: str = "a") -> int:
        """The smallest number of chunks that are predicted to be faster to fetch than to compute,
        in `chunk_seconds` each; NEVER if there is none."""
        for count in range(1, 1000):
            if self.cost_model.seconds(peer, count, self.now) < count * chunk_seconds:
                return count
        return NEVER


def test_unknown_costs_favour_fetching() -> None:
    peer = Peer()
    assert peer.min_chunks() == 1
    assert peer.cost_model.rows_within("a", 0.001, peer.now) == INFINITE
    peer.learn(100.0, 1.0)
    assert peer.min_chunks(peer="b") == 1, "nothing is known of the other peer"


def test_the_minimum_follows_from_both_rates() -> None:
    peer = Peer()
    peer.learn(0.55, 0.028)  # saves 0.1 s a chunk
    assert peer.min_chunks() == 6
    assert peer.min_chunks(CHUNK_SECONDS * 2) == 3
    assert peer.min_chunks(CHUNK_SECONDS / 10) == NEVER


def test_the_first_fetch_opens_the_link_and_does_not_count() -> None:
    peer = Peer()
    peer.fetch(2, 60.0)
    assert peer.min_chunks() == 1
    peer.learn(0.55, 0.028)
    assert peer.min_chunks() == 6


def test_each_transport_has_its_own_rate_and_the_latest_counts() -> None:
    peer = Peer()
    peer.learn(0.55, 0.028)
    peer.fetch(4, 60.0, transport="shared_memory")
    assert peer.min_chunks() == 1
    peer.fetch(4, 0.662)
    assert peer.min_chunks() == 6


def test_a_fetch_that_brought_nothing_measures_nothing() -> None:
    peer = Peer()
    peer.learn(0.55, 0.028)
    peer.fetch(10, 5.0, arrived=0)
    assert peer.min_chunks() == 6


def test_a_slow_peer_is_tried_again_and_its_rate_replaced() -> None:
    peer = Peer()
    peer.learn(1.0, 1.0)
    assert peer.min_chunks() == NEVER
    peer.now += RETRY_AFTER
    assert peer.min_chunks() == NEVER
    peer.now += 1.0
    assert peer.min_chunks() == 1, "one fetch is made anyway"
    fetch = Fetch("a", [Row(b"", 0)] * 10, deadline=0.0)
    peer.cost_model.begun(fetch, 10 * CHUNK_SECONDS, peer.now)
    assert peer.min_chunks() == NEVER, "but no second one before it ends"
    fetch.committed, fetch.seconds, fetch.transport = fetch.rows, 0.1, "gloo"
    peer.cost_model.ended(fetch)
    assert peer.min_chunks() == 1
    peer.now += RETRY_AFTER / 2
    assert peer.cost_model.rows_within("a", 0.05, peer.now) == 5


def test_a_peer_that_is_still_slow_is_avoided_again() -> None:
    peer = Peer()
    peer.learn(1.0, 1.0)
    peer.now += RETRY_AFTER + 1
    assert peer.min_chunks() == 1
    peer.fetch(10, 11.0)
    assert peer.min_chunks() > 10


def test_predictions_are_compared_with_what_fetches_took() -> None:
    peer = Peer()
    peer.learn(0.0, 0.1)
    decisions = peer.cost_model.decisions
    before = replace(decisions)
    peer.fetch(20, 3.0)
    assert decisions.predictions == before.predictions + 1 == 6, (
        "the first two fetches had no prediction"
    )
    assert decisions.error_s - before.error_s == pytest.approx(1.0)
    assert decisions.predicted_s - before.predicted_s == pytest.approx(2.0)
    assert decisions.actual_s - before.actual_s == pytest.approx(3.0)
    assert (before.slower_than_prefill, decisions.slower_than_prefill) == (0, 1), (
        "computing takes 2.56 s"
    )
    report = peer.cost_model.report()
    assert report["predictions"] == 6
    assert report["rates"]["a"]["transport"] == "gloo"
    assert report["rates"]["a"]["bytes_per_s"] > 0


def test_the_number_of_known_peers_is_bounded() -> None:
    cost_model = CostModel(row_bytes=ROW_BYTES)
    for number in range(1000):
        fetch = Fetch(f"peer {number}", [Row(b"", 0)], deadline=0.0)
        cost_model.begun(fetch, CHUNK_SECONDS, float(number))
        cost_model.ended(fetch)
    assert len(cost_model._peers) <= 100
    assert not cost_model._pending

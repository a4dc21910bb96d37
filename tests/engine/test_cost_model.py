"""Fetching is preferred until it was measured to be slower, and tried again after a while."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scheduling import CHUNK, ROW_BYTES
from xinference_xavier.engine.costs import MAX_PAUSE, RETRY_AFTER, CostModel
from xinference_xavier.pool.pool import Row
from xinference_xavier.pool.tier import Fetch

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
        self,
        rows: int,
        seconds: float,
        *,
        arrived: int | None = None,
        transport: str = "gloo",
        reason: str | None = None,
    ) -> None:
        fetch = Fetch("a", [Row(b"", 0)] * rows, deadline=0.0)
        self.now += 1.0
        self.cost_model.begun(fetch, rows * CHUNK_SECONDS, self.now)
        fetch.committed = fetch.rows[: rows if arrived is None else arrived]
        fetch.seconds, fetch.transport, fetch.reason = seconds, transport, reason
        self.cost_model.ended(fetch, self.now)
        self.cost_model.ended(fetch, self.now)

    def learn(self, overhead: float, per_row: float) -> None:
        for rows in (4, 4, 40, 10, 80, 4, 40):
            self.fetch(rows, overhead + per_row * rows)

    def min_chunks(self, chunk_seconds: float = CHUNK_SECONDS, peer: str = "a") -> int:
        """The smallest number of chunks that are predicted to be faster to fetch than to compute,
        at `chunk_seconds` each; NEVER if no number is."""
        for count in range(1, 1000):
            if self.cost_model.rate(peer, self.now).predict(count) < count * chunk_seconds:
                return count
        return NEVER


def test_unknown_costs_favour_fetching() -> None:
    peer = Peer()
    assert peer.min_chunks() == 1
    assert peer.cost_model.rate("a", peer.now).largest(0.001) == math.inf
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


def test_a_failed_fetch_counts_as_the_time_that_it_took() -> None:
    peer = Peer()
    peer.learn(0.0, 0.01)
    before = peer.cost_model.rate("a", peer.now).predict(10)
    peer.fetch(10, 5.0, arrived=0, reason="timeout")
    assert peer.cost_model.rate("a", peer.now).predict(10) > before + 0.5


def test_a_chunk_that_the_donor_lacks_says_nothing_about_it() -> None:
    peer = Peer()
    peer.learn(0.55, 0.028)
    for _ in range(3):
        peer.fetch(10, 5.0, arrived=0, reason="not held")
    assert peer.min_chunks() == 6
    assert peer.cost_model.left_out() == []


class TestFailingPeer:
    @pytest.fixture
    def peer(self) -> Peer:
        peer = Peer()
        peer.learn(0.0, 0.01)
        self.fail(peer)
        return peer

    def fail(self, peer: Peer) -> None:
        peer.fetch(1, 5.0, arrived=0, reason="timeout")

    def test_is_left_out_after_two_failures_in_a_row(self, peer: Peer) -> None:
        assert peer.cost_model.left_out() == []
        peer.fetch(1, 0.01)
        self.fail(peer)
        assert peer.cost_model.left_out() == []
        self.fail(peer)
        assert peer.cost_model.left_out() == ["a"]
        assert peer.cost_model.report()["left_out"] == {"a": "timeout"}

    def test_is_probed_after_pauses_that_double(self, peer: Peer) -> None:
        pauses = []
        for _ in range(9):
            self.fail(peer)
            probe_at = peer.cost_model._left_out["a"].probe_at
            pauses.append(probe_at - peer.now)
            assert peer.cost_model.left_out(probe_at - 0.1) == []
            assert peer.cost_model.left_out(probe_at) == ["a"]
        assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]

    def test_gets_one_probe_at_a_time(self, peer: Peer) -> None:
        self.fail(peer)
        peer.now += 1.0
        peer.cost_model.begun(Fetch("a", [Row(b"", 0)], deadline=0.0), None, peer.now)
        assert peer.cost_model.left_out(peer.now + 1e6) == []
        assert peer.cost_model.left_out() == ["a"]

    def test_is_as_new_after_a_probe_that_succeeds(self, peer: Peer) -> None:
        self.fail(peer)
        peer.fetch(1, 0.01)
        assert peer.cost_model.left_out() == []
        assert peer.cost_model.rate("a", peer.now).predict(10) == 0.0, "its rate is unknown"
        self.fail(peer)
        assert peer.cost_model.left_out() == []


def test_a_fetch_gets_a_multiple_of_its_prediction() -> None:
    peer = Peer()
    assert peer.cost_model.patience("a", 10, peer.now) == math.inf
    peer.learn(0.0, 0.1)
    assert peer.cost_model.patience("a", 10, peer.now) == pytest.approx(4.0)
    assert peer.cost_model.patience("a", 1, peer.now) == 1.0, "long enough for a pause"


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
    peer.cost_model.ended(fetch, peer.now)
    assert peer.min_chunks() == 1
    peer.now += RETRY_AFTER / 2
    assert peer.cost_model.rate("a", peer.now).largest(0.05) == pytest.approx(5)


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
    for number in 2 * [*range(1010)]:
        fetch = Fetch(f"peer {number}", [Row(b"", 0)], deadline=0.0)
        cost_model.begun(fetch, CHUNK_SECONDS, float(number))
        cost_model.ended(fetch, float(number))
    assert len(cost_model._peers) <= 1000
    assert len(cost_model._left_out) <= 1000
    assert len(cost_model.report()["left_out"]) <= 100, "a heartbeat carries it"
    assert not cost_model._pending


@given(
    fetches=st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.floats(0, 100)), max_size=20
    ),
    rows=st.integers(1, 10_000),
)
def test_whatever_was_measured_predictions_and_patience_are_numbers_of_at_least_zero(
    fetches: list[tuple[int, int, float]], rows: int
) -> None:
    peer = Peer()
    for wanted, arrived, seconds in fetches:
        peer.fetch(wanted, seconds, arrived=min(wanted, arrived), reason="timeout")
    assert 0 <= peer.cost_model.rate("a", peer.now).predict(rows) < math.inf
    assert peer.cost_model.patience("a", rows, peer.now) > 0
    for rate in peer.cost_model.report()["rates"].values():
        assert rate["bytes_per_s"] is None or rate["bytes_per_s"] > 0

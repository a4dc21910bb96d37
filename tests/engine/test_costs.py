"""What computing and fetching cost: fetching is preferred until it was measured to be slower, and
tried again after a while."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.engine.scheduling import CHUNK, ROW_BYTES
from xinference_xavier.engine.costs import (
    MAX_PAUSE,
    MAX_RETRY_AFTER,
    RETRY_AFTER,
    CostModel,
    LinearFit,
    PrefillRate,
    StepCost,
)
from xinference_xavier.pool.pool import Row
from xinference_xavier.pool.tier import DISK, Fetch


def fit_of(*points: tuple[float, float]) -> LinearFit:
    fit = LinearFit()
    for x, y in points:
        fit.add(x, y)
    return fit


class TestLinearFit:
    """A line through points, where newer ones count more."""

    def test_points_with_one_x_have_no_slope(self) -> None:
        assert fit_of().slope is None
        assert fit_of((10, 1.0)).slope is None
        assert fit_of((10, 1.0), (10, 2.0), (10.1, 3.0)).slope is None

    def test_the_slope_is_bounded_by_zero_and_the_origin(self) -> None:
        falling = fit_of((1, 10.0), (9, 1.0))
        assert falling.slope == 0.0
        assert falling.largest(0.5) == 0.0, "no x has so little"
        steep = fit_of((1, 0.0), (9, 80.0))
        assert steep.slope == pytest.approx(steep.y / steep.x)

    def test_old_points_are_forgotten(self) -> None:
        old = [(x, 50.0 * x) for x in (1, 9)] * 20
        new = [(x, 2.0 * x) for x in (1, 9)] * 20
        assert fit_of(*old, *new).slope == pytest.approx(2.0, rel=0.05)

    def test_points_on_a_line_give_that_line(self) -> None:
        fit = fit_of(*((x, 0.02 + 0.003 * x) for x in (1, 5, 2, 9, 4)))
        assert fit.slope == pytest.approx(0.003)
        assert fit.predict(200) == pytest.approx(0.62)
        assert fit.largest(0.62) == pytest.approx(200)

    def test_a_prediction_from_points_with_one_x_is_optimistic(self) -> None:
        """Otherwise one short fetch, mostly overhead, would prevent long ones and their
        measurement."""
        fit = fit_of((10, 0.1), (10, 0.1))
        assert [fit.predict(x) for x in (5, 10, 100)] == pytest.approx([0.05, 0.1, 0.1])
        assert fit.largest(0.1) == math.inf
        assert fit.largest(0.05) == pytest.approx(5)

    @given(
        points=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e4)), max_size=30),
        x=st.integers(0, 100_000),
        y=st.floats(-1e4, 1e5),
    )
    @example(points=[(17200, 13.5 / 1000), (9700, 2.0 / 1000)], x=0, y=0.0)  # rounding
    def test_whatever_was_measured_predictions_are_numbers_of_at_least_zero(
        self, points: list[tuple[int, float]], x: int, y: float
    ) -> None:
        fit = fit_of(*points)
        assert 0 <= fit.predict(x) < math.inf
        assert fit.largest(y) >= 0  # NaN would not be
        assert fit.slope is None or 0 <= fit.slope < math.inf


def prompt_computed(rate: PrefillRate, steps: int = 8, tokens: int = 1000) -> None:
    """A token takes 1 ms, plus 1 µs for each token before it."""
    for number in range(steps):
        depth = (number + 0.5) * tokens
        rate.add(tokens, tokens * (1e-3 + 1e-6 * depth), depth)


class TestPrefillRate:
    """The rate follows the steps that compute many prompt tokens, and only those."""

    @pytest.fixture
    def rate(self) -> PrefillRate:
        return PrefillRate()

    def test_nothing_is_known_before_the_first_prefill(self, rate: PrefillRate) -> None:
        rate.add(1, 1.0)
        assert rate.tokens_per_second is None
        assert rate.line() is None
        assert rate.seconds(0, 1000) is None

    def test_decoding_between_prefills_does_not_count(self, rate: PrefillRate) -> None:
        for _ in range(10):
            rate.add(2000, 1.0)
            rate.add(8, 8.0)
        assert rate.tokens_per_second == pytest.approx(2000.0)

    def test_a_change_is_learnt_within_a_few_steps(self, rate: PrefillRate) -> None:
        for number in range(40):
            rate.add(1000, 1.0 if number < 20 else 0.5)
        assert rate.tokens_per_second == pytest.approx(2000.0, rel=0.02)

    def test_an_output_that_is_read_late_changes_little(self, rate: PrefillRate) -> None:
        """One step seems to take twice as long, and the last one of a prompt next to nothing, if
        the engine computes in the scheduling thread."""
        for _ in range(10):
            for seconds in (2.0, 1.0, 1.0, 0.01):
                rate.add(1000, seconds)
        assert rate.tokens_per_second == pytest.approx(1000.0, rel=0.25)

    def test_deeper_tokens_take_longer(self, rate: PrefillRate) -> None:
        prompt_computed(rate)
        assert rate.line() == pytest.approx((1e-3, 1e-6))
        assert rate.seconds(0, 1000) == pytest.approx(1.5)
        assert rate.seconds(0, 8000) == pytest.approx(8 + 32)
        assert rate.seconds(4000, 8000) == pytest.approx(4 + 24)

    def test_with_equally_deep_steps_depth_is_ignored(self, rate: PrefillRate) -> None:
        for _ in range(5):
            prompt_computed(rate, steps=1)
        assert rate.line() == (pytest.approx(1.5e-3), 0.0)
        assert rate.seconds(0, 1000) == rate.seconds(7000, 8000) == pytest.approx(1.5)

    def test_the_line_begins_at_no_time_at_the_least(self, rate: PrefillRate) -> None:
        """Routers refuse the smallest negative number, which rounding produces here."""
        for depth, seconds in ((17200.0, 13.5), (9700.0, 2.0)):
            rate.add(1000, seconds, depth)
        assert rate.line() == (0.0, pytest.approx(5.76e-7, rel=0.01))

    @given(
        steps=st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1e4), st.floats(0, 1e6))),
        first=st.integers(0, 1 << 20),
        tokens=st.integers(0, 1 << 20),
    )
    def test_whatever_was_measured_a_prediction_is_a_number_of_at_least_zero(
        self, steps: list[tuple[int, float, float]], first: int, tokens: int
    ) -> None:
        rate = PrefillRate()
        for step in steps:
            rate.add(*step)
        predicted = rate.seconds(first, first + tokens)
        assert predicted is None or 0 <= predicted < math.inf


def decode(cost: StepCost, *sizes: int, base: float = 0.02, each: float = 0.001) -> None:
    """A step with so many requests, for each size."""
    for requests in sizes:
        cost.add(requests, base + each * requests, tokens=requests)


class TestStepCost:
    """A step takes longer the more requests it has."""

    @pytest.fixture
    def cost(self) -> StepCost:
        return StepCost()

    def test_nothing_is_known_before_the_first_step(self, cost: StepCost) -> None:
        assert cost.line() is None

    @pytest.mark.parametrize("sizes", [[1], [4, 5, 7, 6], [3, 4]])
    def test_steps_with_about_as_many_requests_say_nothing_of_others(
        self, cost: StepCost, sizes: list[int]
    ) -> None:
        decode(cost, *sizes)
        mean = sum(sizes) / len(sizes)
        assert cost.line() == (pytest.approx(0.02 + 0.001 * mean), 0.0)

    def test_different_steps_give_their_line(self, cost: StepCost) -> None:
        decode(cost, 1, 40, 3, 9, 5, 40, 200)
        assert cost.line() == pytest.approx((0.02, 0.001))

    def test_what_few_requests_took_counts_on_while_there_are_many(self, cost: StepCost) -> None:
        decode(cost, *[1] * 50, *[64] * 5000)
        assert cost.line() == pytest.approx((0.02, 0.001))

    def test_a_change_is_learnt_within_some_hundred_steps(self, cost: StepCost) -> None:
        decode(cost, *[1, 64] * 100)
        decode(cost, *[1, 64] * 200, base=0.04, each=0.002)
        assert cost.line() == pytest.approx((0.04, 0.002), rel=0.02)

    def test_one_slow_step_of_a_rare_size_changes_little(self, cost: StepCost) -> None:
        decode(cost, *[1, 64] * 50)
        decode(cost, 9, base=0.2)
        assert cost.line() == pytest.approx((0.02, 0.001), rel=0.2)

    def test_the_line_neither_falls_nor_begins_below_zero(self, cost: StepCost) -> None:
        decode(cost, 1, 9, base=0.02, each=-0.001)
        assert cost.line() == (pytest.approx(0.015), 0.0)
        steep = StepCost()
        decode(steep, 1, 9, base=-0.001, each=0.001)
        assert steep.line() == (0.0, pytest.approx(0.004 / 5))

    def test_answers_that_get_several_tokens_in_a_step_take_less_for_each(
        self, cost: StepCost
    ) -> None:
        for _ in range(500):
            for requests in (1, 64):
                cost.add(requests, 0.02 + 0.001 * requests, tokens=2 * requests)
        assert cost.line() == pytest.approx((0.01, 0.0005), rel=0.01)
        cost.add(64, 0.084, tokens=None)
        assert cost.line() == pytest.approx((0.01, 0.0005), rel=0.01)

    @given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1e4), st.integers(1, 16))))
    def test_whatever_was_measured_both_are_numbers_of_at_least_zero(
        self, steps: list[tuple[int, float, int]]
    ) -> None:
        cost = StepCost()
        for requests, seconds, each in steps:
            cost.add(requests, seconds, tokens=each * requests)
        assert all(0 <= each < math.inf for each in cost.line() or ())


PREFILL = 1000.0
"""Tokens per second."""
CHUNK_SECONDS = CHUNK / PREFILL
"""0.128, to compute one."""
NEVER = 1 << 30


class Peer:
    """Fetches, mostly from the peer `a`; one begins every second."""

    def __init__(self) -> None:
        self.cost_model = CostModel(row_bytes=ROW_BYTES)
        self.now = 1000.0

    def fetch(
        self,
        rows: int,
        seconds: float,
        *,
        source: str = "a",
        arrived: int | None = None,
        transport: str = "gloo",
        reason: str | None = None,
    ) -> None:
        fetch = Fetch(source, [Row(b"", 0)] * rows, deadline=0.0)
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


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_unknown_costs_favour_fetching(peer: Peer) -> None:
    assert peer.min_chunks() == 1
    assert peer.cost_model.rate("a", peer.now).largest(0.001) == math.inf
    peer.learn(100.0, 1.0)
    assert peer.min_chunks(peer="b") == 1, "nothing is known of the other peer"


def test_the_minimum_follows_from_both_rates(peer: Peer) -> None:
    peer.learn(0.55, 0.028)  # saves 0.1 s a chunk
    assert peer.min_chunks() == 6
    assert peer.min_chunks(CHUNK_SECONDS * 2) == 3
    assert peer.min_chunks(CHUNK_SECONDS / 10) == NEVER


def test_each_transport_has_its_own_rate_and_the_latest_counts(peer: Peer) -> None:
    peer.learn(0.55, 0.028)
    peer.fetch(4, 60.0, transport="shared_memory")
    assert peer.min_chunks() == 1, "the first fetch opens the link and does not count"
    peer.fetch(4, 0.662)
    assert peer.min_chunks() == 6


def test_a_failed_fetch_counts_as_the_time_that_it_took(peer: Peer) -> None:
    peer.learn(0.0, 0.01)
    before = peer.cost_model.rate("a", peer.now).predict(10)
    peer.fetch(10, 5.0, arrived=0, reason="timeout")
    assert peer.cost_model.rate("a", peer.now).predict(10) > before + 0.5


def test_a_chunk_that_the_donor_lacks_says_nothing_about_it(peer: Peer) -> None:
    peer.learn(0.55, 0.028)
    for _ in range(3):
        peer.fetch(10, 5.0, arrived=0, reason="not held")
    assert peer.min_chunks() == 6
    assert peer.cost_model.left_out() == []


class TestFailingPeer:
    @pytest.fixture
    def peer(self, peer: Peer) -> Peer:
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
        assert peer.cost_model.report(len)["left_out"] == {"a": "timeout"}

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


def test_a_fetch_gets_a_multiple_of_its_prediction(peer: Peer) -> None:
    assert peer.cost_model.patience("a", 10, peer.now) == math.inf
    peer.learn(0.0, 0.1)
    assert peer.cost_model.patience("a", 10, peer.now) == pytest.approx(4.0)
    assert peer.cost_model.patience("a", 1, peer.now) == 1.0, "long enough for a pause"


def test_a_slow_peer_is_tried_again_and_its_rate_replaced(peer: Peer) -> None:
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


def test_a_peer_that_is_still_slow_is_avoided_again(peer: Peer) -> None:
    peer.learn(1.0, 1.0)
    peer.now += RETRY_AFTER + 1
    assert peer.min_chunks() == 1
    peer.fetch(10, 11.0)
    assert peer.min_chunks() > 10


def test_a_peer_that_stays_slow_is_tried_less_and_less(peer: Peer) -> None:
    peer.learn(1.0, 1.0)
    after = RETRY_AFTER
    while after < MAX_RETRY_AFTER:
        peer.now += after + 1
        peer.fetch(10, 11.0)
        after *= 2
        peer.now += after
        assert peer.min_chunks() > 10
        assert peer.cost_model.measured(peer.now) == ["a"]
    peer.now += MAX_RETRY_AFTER + 1
    peer.fetch(10, 11.0)
    peer.now += MAX_RETRY_AFTER + 1
    assert peer.min_chunks() == 1, "it is never given up"


def test_a_disk_whose_first_reading_is_slow_is_tried_as_soon_as_a_peer(peer: Peer) -> None:
    peer.fetch(10, 11.0, source=DISK, transport=DISK)
    assert peer.cost_model.measured(peer.now + RETRY_AFTER) == [DISK]
    assert peer.cost_model.measured(peer.now + RETRY_AFTER + 1) == []


def test_a_peer_that_was_slow_and_is_fast_is_as_any_other(peer: Peer) -> None:
    peer.learn(1.0, 1.0)
    peer.now += RETRY_AFTER + 1
    peer.fetch(10, 11.0)
    peer.now += 2 * RETRY_AFTER + 1
    peer.fetch(10, 0.1)
    peer.fetch(10, 11.0)
    peer.now += RETRY_AFTER + 1
    assert peer.min_chunks() == 1


def test_fetches_that_took_longer_than_computing_are_counted(peer: Peer) -> None:
    peer.learn(0.0, 0.1)
    counted = peer.cost_model.decisions.slower_than_prefill
    peer.fetch(20, 2.5)
    assert peer.cost_model.decisions.slower_than_prefill == counted
    peer.fetch(20, 3.0)
    assert peer.cost_model.decisions.slower_than_prefill == counted + 1, "computing takes 2.56 s"


def test_the_number_of_known_peers_is_bounded() -> None:
    cost_model = CostModel(row_bytes=ROW_BYTES)
    for number in sorted(2 * [*range(1010)]):
        fetch = Fetch(f"peer {number}", [Row(b"", 0)], deadline=0.0)
        cost_model.begun(fetch, CHUNK_SECONDS, float(number))
        cost_model.ended(fetch, float(number))
    assert len(cost_model._peers) == len(cost_model._left_out) == 1000
    assert len(cost_model.report(len)["left_out"]) == 100, "a heartbeat carries it"
    oldest = next(iter(cost_model._left_out))
    remaining = cost_model.report(lambda names: names == [oldest])["left_out"]
    assert list(remaining) == [oldest], "those that have left do not hide it"
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
    for rate in peer.cost_model.rates().values():
        assert rate["bytes_per_s"] is None or rate["bytes_per_s"] > 0

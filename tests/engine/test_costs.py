"""What computing and fetching cost: fetching is preferred until it was measured to be slower, and
tried again after a while."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scheduling import CHUNK, ROW_BYTES
from xinference_xavier.engine.costs import CostModel, PrefillRate, StepCost
from xinference_xavier.peers import DISK, MAX_PAUSE, MAX_RETRY_AFTER, RETRY_AFTER, Peers, Source
from xinference_xavier.pool.pool import Row
from xinference_xavier.protocol.tracker import Left, Member
from xinference_xavier.replica.fetcher import Fetch


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


class Fetching:
    """Fetches, mostly from the peer `a`; one begins every second."""

    def __init__(self) -> None:
        self.peers = Peers("own")
        for name in "ab":
            self.peers.follow(Member(name, "127.0.0.1:1"))
        self.cost_model = CostModel(self.peers, row_bytes=ROW_BYTES)
        self.now = 1000.0

    @property
    def a(self) -> Source:
        return self.peers["a"]

    def fetch(
        self,
        rows: int,
        seconds: float,
        *,
        source: Source | None = None,
        arrived: int | None = None,
        transport: str = "gloo",
        reason: str | None = None,
    ) -> None:
        source = source or self.a
        fetch = Fetch(source.name, [Row(b"", 0)] * rows, deadline=0.0)
        self.now += 1.0
        self.cost_model.begun(fetch, source, rows * CHUNK_SECONDS, self.now)
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
            if self.peers[peer].rate(self.now).predict(count) < count * chunk_seconds:
                return count
        return NEVER


@pytest.fixture
def fetching() -> Fetching:
    return Fetching()


def test_unknown_costs_favour_fetching(fetching: Fetching) -> None:
    assert fetching.min_chunks() == 1
    assert fetching.a.rate(fetching.now).largest(0.001) == math.inf
    fetching.learn(100.0, 1.0)
    assert fetching.min_chunks(peer="b") == 1, "nothing is known of the other peer"


def test_the_minimum_follows_from_both_rates(fetching: Fetching) -> None:
    fetching.learn(0.55, 0.028)  # saves 0.1 s a chunk
    assert fetching.min_chunks() == 6
    assert fetching.min_chunks(CHUNK_SECONDS * 2) == 3
    assert fetching.min_chunks(CHUNK_SECONDS / 10) == NEVER


def test_each_transport_has_its_own_rate_and_the_latest_counts(fetching: Fetching) -> None:
    fetching.learn(0.55, 0.028)
    fetching.fetch(4, 60.0, transport="shared_memory")
    assert fetching.min_chunks() == 1, "the first fetch opens the link and does not count"
    fetching.fetch(4, 0.662)
    assert fetching.min_chunks() == 6


def test_a_failed_fetch_counts_as_the_time_that_it_took(fetching: Fetching) -> None:
    fetching.learn(0.0, 0.01)
    before = fetching.a.rate(fetching.now).predict(10)
    fetching.fetch(10, 5.0, arrived=0, reason="timeout")
    assert fetching.a.rate(fetching.now).predict(10) > before + 0.5


def test_a_chunk_that_the_donor_lacks_says_nothing_about_it(fetching: Fetching) -> None:
    fetching.learn(0.55, 0.028)
    for _ in range(3):
        fetching.fetch(10, 5.0, arrived=0, reason="not held")
    assert fetching.min_chunks() == 6
    assert not fetching.a.outage.is_on


class TestFailingPeer:
    @pytest.fixture
    def fetching(self, fetching: Fetching) -> Fetching:
        fetching.learn(0.0, 0.01)
        self.fail(fetching)
        return fetching

    def fail(self, fetching: Fetching) -> None:
        fetching.fetch(1, 5.0, arrived=0, reason="timeout")

    def test_is_left_out_after_two_failures_in_a_row(self, fetching: Fetching) -> None:
        assert not fetching.a.outage.is_on
        fetching.fetch(1, 0.01)
        self.fail(fetching)
        assert not fetching.a.outage.is_on
        self.fail(fetching)
        assert fetching.a.outage.is_on
        assert fetching.cost_model.report()["left_out"] == {"a": "timeout"}
        fetching.peers.follow(Left("a"))
        fetching.peers.follow(Left("b"))
        fetching.peers.forget_absent()
        assert fetching.cost_model.report()["left_out"] == {}, "nobody can mend what has left"

    def test_is_tried_after_pauses_that_double(self, fetching: Fetching) -> None:
        pauses = []
        for _ in range(9):
            self.fail(fetching)
            at = fetching.a.outage.until
            pauses.append(at - fetching.now)
            assert not fetching.a.is_due(at - 0.1)
            assert fetching.a.is_due(at)
        assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]

    def test_gets_one_trial_at_a_time(self, fetching: Fetching) -> None:
        self.fail(fetching)
        fetching.now += 1.0
        fetch = Fetch("a", [Row(b"", 0)], deadline=0.0)
        fetching.cost_model.begun(fetch, fetching.a, None, fetching.now)
        assert fetching.a.outage.is_on
        assert not fetching.a.is_due(fetching.now + 1e6)
        fetch.reason = "not held"
        fetching.cost_model.ended(fetch, fetching.now)
        assert not fetching.a.is_due(fetching.now)
        assert fetching.a.is_due(fetching.now + 1.0), "it said nothing about the peer"

    def test_is_as_new_after_a_trial_that_succeeds(self, fetching: Fetching) -> None:
        self.fail(fetching)
        fetching.fetch(1, 0.01)
        assert not fetching.a.outage.is_on
        assert fetching.a.rate(fetching.now).predict(10) == 0.0, "its rate is unknown"
        self.fail(fetching)
        assert not fetching.a.outage.is_on


def test_a_fetch_gets_a_multiple_of_its_prediction(fetching: Fetching) -> None:
    assert fetching.a.patience(10, fetching.now) == math.inf
    fetching.learn(0.0, 0.1)
    assert fetching.a.patience(10, fetching.now) == pytest.approx(4.0)
    assert fetching.a.patience(1, fetching.now) == 1.0, "long enough for a pause"


def test_a_slow_peer_is_tried_again_and_its_rate_replaced(fetching: Fetching) -> None:
    fetching.learn(1.0, 1.0)
    assert fetching.min_chunks() == NEVER
    fetching.now += RETRY_AFTER
    assert fetching.min_chunks() == NEVER
    fetching.now += 1.0
    assert fetching.min_chunks() == 1, "one fetch is made anyway"
    fetch = Fetch("a", [Row(b"", 0)] * 10, deadline=0.0)
    fetching.cost_model.begun(fetch, fetching.a, 10 * CHUNK_SECONDS, fetching.now)
    assert fetching.min_chunks() == NEVER, "but no second one before it ends"
    fetch.committed, fetch.seconds, fetch.transport = fetch.rows, 0.1, "gloo"
    fetching.cost_model.ended(fetch, fetching.now)
    assert fetching.min_chunks() == 1
    fetching.now += RETRY_AFTER / 2
    assert fetching.a.rate(fetching.now).largest(0.05) == pytest.approx(5)


def test_a_peer_that_stays_slow_is_tried_less_and_less(fetching: Fetching) -> None:
    fetching.learn(1.0, 1.0)
    after = RETRY_AFTER
    while after < MAX_RETRY_AFTER:
        fetching.now += after + 1
        fetching.fetch(10, 11.0)
        after *= 2
        fetching.now += after
        assert fetching.min_chunks() > 10
        assert fetching.a.rate(fetching.now)
    fetching.now += MAX_RETRY_AFTER + 1
    fetching.fetch(10, 11.0)
    fetching.now += MAX_RETRY_AFTER + 1
    assert fetching.min_chunks() == 1, "it is never given up"


def test_a_disk_whose_first_reading_is_slow_is_tried_as_soon_as_a_peer(fetching: Fetching) -> None:
    disk = fetching.peers.disk
    fetching.fetch(10, 11.0, source=disk, transport=DISK)
    assert disk.rate(fetching.now + RETRY_AFTER)
    assert not disk.rate(fetching.now + RETRY_AFTER + 1)


def test_a_peer_that_was_slow_and_is_fast_is_as_any_other(fetching: Fetching) -> None:
    fetching.learn(1.0, 1.0)
    fetching.now += RETRY_AFTER + 1
    fetching.fetch(10, 11.0)
    fetching.now += 2 * RETRY_AFTER + 1
    fetching.fetch(10, 0.1)
    fetching.fetch(10, 11.0)
    fetching.now += RETRY_AFTER + 1
    assert fetching.min_chunks() == 1


def test_fetches_that_took_longer_than_computing_are_counted(fetching: Fetching) -> None:
    fetching.learn(0.0, 0.1)
    decisions = fetching.cost_model.decisions
    counted = decisions.slower_than_prefill
    fetching.fetch(20, 2.5)
    assert decisions.slower_than_prefill == counted
    fetching.fetch(20, 3.0)
    assert decisions.slower_than_prefill == counted + 1, "computing takes 2.56 s"


@given(
    fetches=st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.floats(0, 100)), max_size=20
    ),
    rows=st.integers(1, 10_000),
)
def test_whatever_was_measured_predictions_and_patience_are_numbers_of_at_least_zero(
    fetches: list[tuple[int, int, float]], rows: int
) -> None:
    fetching = Fetching()
    for wanted, arrived, seconds in fetches:
        fetching.fetch(wanted, seconds, arrived=min(wanted, arrived), reason="timeout")
    assert 0 <= fetching.a.rate(fetching.now).predict(rows) < math.inf
    assert fetching.a.patience(rows, fetching.now) > 0
    for rate in fetching.cost_model.rates().values():
        assert rate["bytes_per_s"] is None or rate["bytes_per_s"] > 0

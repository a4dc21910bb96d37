"""The rate follows the steps that compute many prompt tokens, and only those."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.engine.costs import PrefillRate


def test_nothing_is_known_before_the_first_prefill() -> None:
    rate = PrefillRate()
    rate.add(1, 1.0)
    assert rate.tokens_per_second is None
    assert rate.line() is None


def test_decoding_between_prefills_does_not_count() -> None:
    rate = PrefillRate()
    for _ in range(10):
        rate.add(2000, 1.0)
        rate.add(8, 8.0)
    assert rate.tokens_per_second == pytest.approx(2000.0)


def test_a_change_is_learnt_within_a_few_steps() -> None:
    rate = PrefillRate()
    for number in range(40):
        rate.add(1000, 1.0 if number < 20 else 0.5)
    assert rate.tokens_per_second == pytest.approx(2000.0, rel=0.02)


def test_an_output_that_is_read_late_changes_little() -> None:
    """If the engine computes in the scheduling thread, one step seems to take twice as long and the
    last one of a prompt next to nothing."""
    rate = PrefillRate()
    for _ in range(10):
        for seconds in (2.0, 1.0, 1.0, 0.01):
            rate.add(1000, seconds)
    assert rate.tokens_per_second == pytest.approx(1000.0, rel=0.25)


def prompt_computed(rate: PrefillRate, steps: int = 8, tokens: int = 1000) -> None:
    """A token takes 1 ms, plus 1 µs for each token before it."""
    for number in range(steps):
        depth = (number + 0.5) * tokens
        rate.add(tokens, tokens * (1e-3 + 1e-6 * depth), depth)


def test_deeper_tokens_take_longer() -> None:
    rate = PrefillRate()
    prompt_computed(rate)
    assert rate.seconds(0, 1000) == pytest.approx(1.5)
    assert rate.seconds(0, 8000) == pytest.approx(8 + 32)
    assert rate.seconds(4000, 8000) == pytest.approx(4 + 24)


def test_with_equally_deep_steps_depth_is_ignored() -> None:
    rate = PrefillRate()
    assert rate.seconds(0, 1000) is None
    for _ in range(5):
        prompt_computed(rate, steps=1)
    assert rate.seconds(0, 1000) == rate.seconds(7000, 8000) == pytest.approx(1.5)


def test_predictions_are_positive() -> None:
    """Noise can produce any line."""
    rate = PrefillRate()
    for depth, seconds in ((100.0, 0.1), (5000.0, 9.0), (9000.0, 30.0)):
        rate.add(1000, seconds, depth)
    shallow = rate.seconds(0, 100)
    assert shallow is not None
    assert shallow > 0
    rate = PrefillRate()
    for depth, seconds in ((9000.0, 1.0), (100.0, 9.0)):
        rate.add(1000, seconds, depth)
    deep = rate.seconds(100_000, 101_000)
    assert deep is not None
    assert deep > 0


class TestLine:
    def test_tells_what_the_first_token_takes_and_how_much_longer_deeper_ones_take(self) -> None:
        rate = PrefillRate()
        prompt_computed(rate)
        line = rate.line()
        assert line == pytest.approx((1e-3, 1e-6))
        assert line is not None
        first, deeper = line
        assert 8000 * (first + deeper * 4000) == pytest.approx(rate.seconds(0, 8000))

    def test_is_level_while_all_steps_are_equally_deep(self) -> None:
        rate = PrefillRate()
        prompt_computed(rate, steps=1)
        assert rate.line() == (pytest.approx(1.5e-3), 0.0)

    def test_begins_at_no_time_at_the_least(self) -> None:
        """Routers refuse the smallest negative number, which rounding produces here."""
        rate = PrefillRate()
        for depth, seconds in ((17200.0, 13.5), (9700.0, 2.0)):
            rate.add(1000, seconds, depth)
        assert rate.line() == (0.0, pytest.approx(5.76e-7, rel=0.01))


@given(
    steps=st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1e4), st.floats(0, 1e6))),
    first=st.integers(0, 1 << 20),
    tokens=st.integers(0, 1 << 20),
)
def test_a_prediction_is_a_number_of_at_least_zero(
    steps: list[tuple[int, float, float]], first: int, tokens: int
) -> None:
    rate = PrefillRate()
    for step in steps:
        rate.add(*step)
    predicted = rate.seconds(first, first + tokens)
    assert predicted is None or 0 <= predicted < math.inf

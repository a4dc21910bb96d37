"""The rate follows the steps that compute many tokens, and only these."""

from __future__ import annotations

import pytest

from xinference_xavier.engine.prefill_rate import PrefillRate


def test_nothing_is_known_before_the_first_prefill() -> None:
    rate = PrefillRate()
    rate.step_ends(1.0)
    rate.step_begins(1, 1.0)
    rate.step_ends(2.0)
    assert rate.tokens_per_second is None


def test_a_step_lasts_until_its_end_or_the_next_one() -> None:
    rate = PrefillRate()
    rate.step_begins(2000, 10.0)
    rate.step_ends(12.0)
    rate.step_ends(500.0)  # idle since
    assert rate.tokens_per_second == 1000.0
    rate = PrefillRate()
    rate.step_begins(2000, 10.0)
    rate.step_begins(1, 11.0)
    assert rate.tokens_per_second == 2000.0


def test_decoding_between_prefills_does_not_count() -> None:
    rate = PrefillRate()
    for number in range(10):
        rate.step_begins(2000, 10.0 * number)
        rate.step_begins(8, 10.0 * number + 1)
        rate.step_ends(10.0 * number + 9)
    assert rate.tokens_per_second == pytest.approx(2000.0)


def test_it_follows_a_change_within_some_steps() -> None:
    rate = PrefillRate()
    for number in range(40):
        rate.step_begins(1000, float(number))
        rate.step_ends(number + (1.0 if number < 20 else 0.5))
    assert rate.tokens_per_second == pytest.approx(2000.0, rel=0.02)


def prompt_computed(rate: PrefillRate, steps: int = 8, tokens: int = 1000) -> None:
    """A token takes 1 ms, and a microsecond for each one before it."""
    now = 0.0
    for number in range(steps):
        depth = (number + 0.5) * tokens
        rate.step_begins(tokens, now, depth)
        now += tokens * (1e-3 + 1e-6 * depth)
        rate.step_ends(now)


def test_deeper_tokens_take_longer() -> None:
    rate = PrefillRate()
    prompt_computed(rate)
    assert rate.seconds(0, 1000) == pytest.approx(1.5)
    assert rate.seconds(0, 8000) == pytest.approx(8 + 32)
    assert rate.seconds(4000, 8000) == pytest.approx(4 + 24)


def test_while_all_steps_were_equally_deep_all_tokens_are_equal() -> None:
    rate = PrefillRate()
    assert rate.seconds(0, 1000) is None
    for _ in range(5):
        prompt_computed(rate, steps=1)
    assert rate.seconds(0, 1000) == rate.seconds(7000, 8000) == pytest.approx(1.5)


def test_no_token_takes_less_than_nothing() -> None:
    """Steps that others disturbed may lie on any line."""
    rate = PrefillRate()
    for depth, seconds in ((100.0, 0.1), (5000.0, 9.0), (9000.0, 30.0)):
        rate.step_begins(1000, 0.0, depth)
        rate.step_ends(seconds)
    shallow = rate.seconds(0, 100)
    assert shallow is not None
    assert shallow > 0
    rate = PrefillRate()
    for depth, seconds in ((9000.0, 1.0), (100.0, 9.0)):
        rate.step_begins(1000, 0.0, depth)
        rate.step_ends(seconds)
    deep = rate.seconds(100_000, 101_000)
    assert deep is not None
    assert deep > 0

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

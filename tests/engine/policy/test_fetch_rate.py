"""The duration of a fetch is predicted from earlier fetches."""

from __future__ import annotations

import random

import pytest

from xinference_xavier.engine.policy.fetch_rate import INFINITE, FetchRate


def rate_of(*fetches: tuple[int, float]) -> FetchRate:
    rate = FetchRate()
    for rows, seconds in fetches:
        rate.add(rows, seconds)
    return rate


def test_overhead_and_time_per_row_are_separated() -> None:
    source = random.Random(0)
    sizes = [source.randrange(1, 100) for _ in range(30)]
    rate = rate_of(*((rows, 0.02 + 0.003 * rows) for rows in sizes))
    (line,) = rate.lines
    assert line == pytest.approx((0.02, 0.003), rel=0.02)
    assert rate.seconds(200) == pytest.approx(0.62, rel=0.02)


def test_fetches_of_one_size_are_interpreted_optimistically() -> None:
    """Otherwise one short fetch, mostly overhead, would prevent long ones and their measurement."""
    rate = rate_of((10, 0.1), (10, 0.1))
    assert rate.seconds(10) == pytest.approx(0.1)
    assert rate.seconds(5) == pytest.approx(0.05)
    assert rate.seconds(100) == pytest.approx(0.1)


def test_a_change_is_learnt_within_a_few_fetches() -> None:
    slow = [(rows, 0.1 * rows) for rows in (5, 50) * 10]
    fast = [(rows, 0.001 * rows) for rows in (5, 50) * 20]
    assert rate_of(*slow, *fast).seconds(100) == pytest.approx(0.1, rel=0.05)


def test_predictions_are_never_negative() -> None:
    rate = rate_of((1, 0.5), (50, 0.1), (100, 0.05))
    assert min(rate.seconds(rows) for rows in (0, 1, 10, 1000)) >= 0


def test_rows_that_arrive_in_time() -> None:
    rate = rate_of(*((rows, 0.1 + 0.01 * rows) for rows in (1, 20, 40) * 10))
    assert rate.rows_within(0.505) == 40
    assert rate.rows_within(0.05) == 0
    assert rate_of((10, 0.1)).rows_within(1.0) == INFINITE, "all of it may be overhead"

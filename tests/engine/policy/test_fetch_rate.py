"""How long a fetch will take follows from those that there were."""

from __future__ import annotations

import random

import pytest

from xinference_xavier.engine.policy.fetch_rate import INFINITE, FetchRate


def rate_of(*fetches: tuple[int, float]) -> FetchRate:
    rate = FetchRate()
    for rows, seconds in fetches:
        rate.add(rows, seconds)
    return rate


def test_overhead_and_time_per_row_are_told_apart() -> None:
    source = random.Random(0)
    sizes = [source.randrange(1, 100) for _ in range(30)]
    rate = rate_of(*((rows, 0.02 + 0.003 * rows) for rows in sizes))
    (line,) = rate.lines
    assert line == pytest.approx((0.02, 0.003), rel=0.02)
    assert rate.seconds(200) == pytest.approx(0.62, rel=0.02)


def test_fetches_of_one_size_are_taken_for_what_promises_most() -> None:
    """Or one short fetch, all overhead, would speak against long ones, which nothing measures."""
    rate = rate_of((10, 0.1), (10, 0.1))
    assert rate.seconds(10) == pytest.approx(0.1)
    assert rate.seconds(5) == pytest.approx(0.05)
    assert rate.seconds(100) == pytest.approx(0.1)


def test_it_follows_a_change_within_some_fetches() -> None:
    slow = [(rows, 0.1 * rows) for rows in (5, 50) * 10]
    quick = [(rows, 0.001 * rows) for rows in (5, 50) * 20]
    assert rate_of(*slow, *quick).seconds(100) == pytest.approx(0.1, rel=0.05)


def test_larger_fetches_that_were_quicker_do_not_make_negative_times() -> None:
    rate = rate_of((1, 0.5), (50, 0.1), (100, 0.05))
    assert min(rate.seconds(rows) for rows in (0, 1, 10, 1000)) >= 0


def test_as_many_chunks_are_worth_a_fetch_as_make_up_for_its_overhead() -> None:
    rate = rate_of(*((rows, 0.1 + 0.01 * rows) for rows in (1, 20, 40) * 10))
    assert rate.min_chunks(1, chunk_seconds=0.03) == 6  # saves 0.02 s each
    assert rate.min_chunks(2, chunk_seconds=0.03) == 11
    assert rate.min_chunks(1, chunk_seconds=0.005) == INFINITE
    assert rate_of((10, 0.1)).min_chunks(1, chunk_seconds=0.005) == 21, "all of it may be overhead"


def test_how_much_arrives_in_time() -> None:
    rate = rate_of(*((rows, 0.1 + 0.01 * rows) for rows in (1, 20, 40) * 10))
    assert rate.rows_within(0.505) == 40
    assert rate.rows_within(0.05) == 0
    assert rate_of((10, 0.1)).rows_within(1.0) == INFINITE, "all of it may be overhead"

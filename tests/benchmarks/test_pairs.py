"""Pairs are measured until their ratio is known well enough or time is up."""

from __future__ import annotations

import math
import time

import pytest

from benchmarks import pairs
from benchmarks.figures import MIN_SAMPLES


def test_the_interval_is_from_students_t() -> None:
    """For five ratios: 2.776 standard errors to either side of the geometric mean."""
    ratios = [1.00, 1.02, 0.98, 1.01, 0.99]
    found = pairs.interval([ratio * 3 for ratio in ratios], [3] * 5)
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / 5
    error = math.sqrt(sum((log - mean) ** 2 for log in logs) / 4 / 5)
    assert found.ratio == pytest.approx(math.exp(mean))
    assert found.low == pytest.approx(math.exp(mean - 2.7764 * error), rel=1e-4)
    assert found.high == pytest.approx(math.exp(mean + 2.7764 * error), rel=1e-4)


def test_it_goes_on_until_the_ratio_is_known() -> None:
    """After the eighth pair the interval is narrow enough for the first time."""
    count = 0

    def run(on: bool) -> pairs.Run:
        nonlocal count
        count += 1
        return {"rate": 1.0 + (0.05 if on and count <= 2 else 0.0)}

    made = pairs.until_known(pairs.in_turns(run), until=math.inf, watched={"rate": 0.015})
    assert pairs.ratio_of(made, "rate").half_width <= 0.015
    assert pairs.ratio_of(made[:-1], "rate").half_width > 0.015
    assert len(made) > MIN_SAMPLES


def test_the_least_number_of_pairs_is_measured_even_if_time_is_up() -> None:
    order: list[bool] = []

    def run(on: bool) -> pairs.Run:
        order.append(on)
        return {"rate": float(len(order))}

    over = time.monotonic() - 1
    made = pairs.until_known(pairs.in_turns(run), until=over, watched={"rate": 0.0})
    assert len(made) == MIN_SAMPLES
    assert order[:4] == [True, False, False, True]
    assert [(on["rate"], off["rate"]) for on, off in made[:2]] == [(1, 2), (4, 3)]

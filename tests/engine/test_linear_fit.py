"""A line through points, where newer ones count more."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.engine.costs import LinearFit


def fit_of(*points: tuple[float, float]) -> LinearFit:
    fit = LinearFit()
    for x, y in points:
        fit.add(x, y)
    return fit


def test_points_on_a_line_give_that_line() -> None:
    fit = fit_of(*((x, 2.0 + 3.0 * x) for x in (1, 5, 2, 9, 4)))
    assert fit.slope == pytest.approx(3.0)
    assert fit.y == pytest.approx(2.0 + 3.0 * fit.x)


def test_points_with_one_x_have_no_slope() -> None:
    assert fit_of().slope is None
    assert fit_of((10, 1.0)).slope is None
    assert fit_of((10, 1.0), (10, 2.0), (10.1, 3.0)).slope is None


def test_the_slope_is_bounded_by_zero_and_the_origin() -> None:
    assert fit_of((1, 10.0), (9, 1.0)).slope == 0.0
    steep = fit_of((1, 0.0), (9, 80.0))
    assert steep.slope == pytest.approx(steep.y / steep.x)


def test_old_points_are_forgotten() -> None:
    old = [(x, 50.0 * x) for x in (1, 9)] * 20
    new = [(x, 2.0 * x) for x in (1, 9)] * 20
    assert fit_of(*old, *new).slope == pytest.approx(2.0, rel=0.05)


class TestPrediction:
    def test_follows_the_line(self) -> None:
        source = random.Random(0)
        sizes = [source.randrange(1, 100) for _ in range(30)]
        fit = fit_of(*((rows, 0.02 + 0.003 * rows) for rows in sizes))
        assert fit.predict(200) == pytest.approx(0.62, rel=0.02)
        assert fit.largest(0.62) == pytest.approx(200, rel=0.02)

    def test_of_points_with_one_x_is_optimistic(self) -> None:
        """Otherwise one short fetch, mostly overhead, would prevent long ones and their
        measurement."""
        fit = fit_of((10, 0.1), (10, 0.1))
        assert [fit.predict(x) for x in (5, 10, 100)] == pytest.approx([0.05, 0.1, 0.1])
        assert fit.largest(0.1) == math.inf
        assert fit.largest(0.05) == pytest.approx(5)

    def test_is_never_negative(self) -> None:
        fit = fit_of((1, 0.5), (50, 0.1), (100, 0.05))
        assert min(fit.predict(x) for x in (0, 1, 10, 1000)) >= 0
        assert fit.largest(0.01) == 0.0
        rounded = fit_of((17200, 13.5 / 1000), (9700, 2.0 / 1000))
        assert rounded.predict(0) == 0.0

    @given(
        points=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e4)), max_size=30),
        x=st.integers(0, 100_000),
        y=st.floats(-1e4, 1e5),
    )
    def test_is_a_number_of_at_least_zero_whatever_was_measured(
        self, points: list[tuple[int, float]], x: int, y: float
    ) -> None:
        fit = fit_of(*points)
        assert 0 <= fit.predict(x) < math.inf
        assert fit.largest(y) >= 0  # NaN would not be
        assert fit.slope is None or 0 <= fit.slope < math.inf

"""A line through points, where newer ones count more."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xinference_xavier.runtime.linear_fit import LinearFit


def fit_of(*points: tuple[float, float]) -> LinearFit:
    fit = LinearFit()
    for x, y in points:
        fit.add(x, y)
    return fit


def test_points_with_one_x_have_no_slope() -> None:
    assert fit_of().slope is None
    assert fit_of((10, 1.0)).slope is None
    assert fit_of((10, 1.0), (10, 2.0), (10.1, 3.0)).slope is None


def test_the_slope_is_bounded_by_zero_and_the_origin() -> None:
    falling = fit_of((1, 10.0), (9, 1.0))
    assert falling.slope == 0.0
    assert falling.largest(0.5) == 0.0, "no x has so little"
    steep = fit_of((1, 0.0), (9, 80.0))
    assert steep.slope == pytest.approx(steep.y / steep.x)


def test_old_points_are_forgotten() -> None:
    old = [(x, 50.0 * x) for x in (1, 9)] * 20
    new = [(x, 2.0 * x) for x in (1, 9)] * 20
    assert fit_of(*old, *new).slope == pytest.approx(2.0, rel=0.05)


def test_points_on_a_line_give_that_line() -> None:
    fit = fit_of(*((x, 0.02 + 0.003 * x) for x in (1, 5, 2, 9, 4)))
    assert fit.slope == pytest.approx(0.003)
    assert fit.predict(200) == pytest.approx(0.62)
    assert fit.largest(0.62) == pytest.approx(200)


def test_a_prediction_from_points_with_one_x_is_optimistic() -> None:
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
    points: list[tuple[int, float]], x: int, y: float
) -> None:
    fit = fit_of(*points)
    assert 0 <= fit.predict(x) < math.inf
    assert fit.largest(y) >= 0  # NaN would not be
    assert fit.slope is None or 0 <= fit.slope < math.inf

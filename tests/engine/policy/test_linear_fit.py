"""A line through points, of which the newer ones count more."""

from __future__ import annotations

import pytest

from xinference_xavier.engine.policy.linear_fit import LinearFit


def trend_of(*points: tuple[float, float]) -> LinearFit:
    trend = LinearFit()
    for x, y in points:
        trend.add(x, y)
    return trend


def test_it_is_the_line_that_all_points_are_on() -> None:
    trend = trend_of(*((x, 2.0 + 3.0 * x) for x in (1, 5, 2, 9, 4)))
    assert trend.slope == pytest.approx(3.0)
    assert trend.y == pytest.approx(2.0 + 3.0 * trend.x)


def test_points_above_each_other_and_none_at_all_have_no_slope() -> None:
    assert trend_of().slope is None
    assert trend_of((10, 1.0)).slope is None
    assert trend_of((10, 1.0), (10, 2.0), (10.1, 3.0)).slope is None


def test_it_neither_falls_nor_comes_from_below_the_origin() -> None:
    assert trend_of((1, 10.0), (9, 1.0)).slope == 0.0
    steep = trend_of((1, 0.0), (9, 80.0))
    assert steep.slope == pytest.approx(steep.y / steep.x)


def test_old_points_are_forgotten() -> None:
    old = [(x, 50.0 * x) for x in (1, 9)] * 20
    new = [(x, 2.0 * x) for x in (1, 9)] * 20
    assert trend_of(*old, *new).slope == pytest.approx(2.0, rel=0.05)

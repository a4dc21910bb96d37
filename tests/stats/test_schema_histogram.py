"""Each observation is counted once, in the bucket whose bound it does not exceed."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.stats.schema import BYTES_BOUNDS, SECONDS_BOUNDS, Histogram


@pytest.mark.parametrize(("value", "bucket"), [(0, 0), (1, 0), (1.5, 1), (2, 1), (2.1, 2), (99, 2)])
def test_a_bound_belongs_to_its_own_bucket(value: float, bucket: int) -> None:
    histogram = Histogram.over((1.0, 2.0))
    histogram.observe(value, (1.0, 2.0))
    assert histogram.counts.index(1) == bucket


@given(st.lists(st.integers(0, 1000)))
def test_nothing_is_lost(values: list[int]) -> None:
    bounds = (10.0, 100.0)
    histogram = Histogram.over(bounds)
    for value in values:
        histogram.observe(value, bounds)
    assert json.loads(json.dumps(asdict(histogram))) == {
        "counts": [
            sum(value <= 10 for value in values),
            sum(10 < value <= 100 for value in values),
            sum(value > 100 for value in values),
        ],
        "sum": sum(values),
    }


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, BYTES_BOUNDS])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))

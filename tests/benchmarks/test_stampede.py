"""How much the cluster computes, and how long the last of several simultaneous requests waits."""

from __future__ import annotations

import pytest

from benchmarks import stampede
from benchmarks.engines import Asked
from tests.benchmarks.parts import shown


def test_tokens_that_are_not_reused_count_as_computed() -> None:
    rush = stampede.Rush.of([Asked(1.0, (1.0,), 0), Asked(3.0, (3.0,), 896)], 1000)
    assert rush == stampede.Rush((1.0, 3.0), 1104)


def test_the_slowest_is_compared_with_a_request_that_is_alone() -> None:
    alone = [stampede.Rush((2.0,), 1000)] * 5
    two = [stampede.Rush((1.0, 3.0), 1100)] * 5
    part = stampede.summary(1000, {1: alone, 2: two})
    (row,) = part["sizes"]
    assert row["computed"]["median"] == pytest.approx(1.1)
    assert (row["first_ms"]["median"], row["slowest_ms"]["median"]) == (1000, 3000)
    assert row["slowest/alone"]["median"] == pytest.approx(1.5)
    assert "| 2 | 1.10 " in shown(stampede, part)

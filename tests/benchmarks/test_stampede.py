"""How much the cluster computed, and how long the last of those who asked at once waited."""

from __future__ import annotations

import pytest

from benchmarks import stampede
from benchmarks.engines import Asked
from tests.benchmarks.parts import shown


def test_what_was_not_reused_was_computed() -> None:
    rush = stampede.Rush.of([Asked(1.0, (1.0,), 0), Asked(3.0, (3.0,), 896)], 1000)
    assert rush == stampede.Rush((1.0, 3.0), 1104)


def test_the_last_one_is_set_beside_one_that_is_alone() -> None:
    alone = [stampede.Rush((2.0,), 1000)] * 5
    two = [stampede.Rush((1.0, 3.0), 1100)] * 5
    part = stampede.summary(1000, {1: alone, 2: two})
    (row,) = part["sizes"]
    assert row["computed"]["median"] == pytest.approx(1.1)
    assert (row["first_ms"]["median"], row["slowest_ms"]["median"]) == (1000, 3000)
    assert row["slowest/alone"]["median"] == pytest.approx(1.5)
    assert "| 2 | 1.10 " in shown(stampede, part)

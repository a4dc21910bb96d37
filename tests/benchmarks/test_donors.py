"""Fetches from two donors are compared with fetches from one."""

from __future__ import annotations

import pytest

from benchmarks import donors
from benchmarks.donors import Sample
from tests.benchmarks.parts import shown


def test_both_are_measured_in_turns() -> None:
    one = [Sample(seconds, (100, 0)) for seconds in (1.0, 1.0, 2.0, 1.0, 1.0)]
    two = [Sample(seconds, (60, 40)) for seconds in (0.6, 0.5, 0.8, 0.6, 0.6)]
    part = donors.summary(one, two)
    assert part["two/one"]["median"] == pytest.approx(0.6)
    assert part["lesser_share"]["median"] == pytest.approx(0.4)
    assert "| 1000 (1000–2000) | 600 (500–800) | 0.60 (0.40–0.60) |" in shown(donors, part)


def test_it_says_why_it_cannot_make_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    part = donors.measure()
    assert "`ip` is missing" in shown(donors, part)

"""The pools together hold more than with plain least-recently-used eviction."""

from __future__ import annotations

import pytest

from benchmarks import capacity
from benchmarks.figures import MIN_SAMPLES


def test_sparing_copies_holds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "SLOTS", 128)
    monkeypatch.setattr(capacity, "REQUESTS", 500)
    monkeypatch.setattr(capacity, "REPLICAS", (2,))
    part = capacity.measure()
    assert [run["choice"] for run in part["runs"]] == list(capacity.CHOICES)
    for run in part["runs"]:
        ours, reference = (run[policy] for policy in capacity.POLICIES)
        assert len(ours["held"]["samples"]) == MIN_SAMPLES
        assert ours["held"]["median"] > reference["held"]["median"] + 0.05
        assert ours["hits"]["median"] > reference["hits"]["median"]
        assert 0 < ours["fetched"]["median"] < ours["hits"]["median"] <= 1
    lines = capacity.markdown(part).splitlines()
    assert lines[-1].count("|") == lines[-5].count("|")

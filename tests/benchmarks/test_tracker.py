"""Every key is published, mirrored and seen by every watcher."""

from __future__ import annotations

import pytest

from benchmarks import tracker

pytestmark = pytest.mark.process


def test_keys_reach_the_mirror_and_the_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "KEYS", 20_000)
    monkeypatch.setattr(tracker, "LOOKUPS", 1000)
    monkeypatch.setattr(tracker, "REPLICAS", (3,))
    monkeypatch.setattr(tracker, "SECONDS", 0.1)
    monkeypatch.setattr(tracker, "PUBLICATIONS", 10)
    part = tracker.measure()
    assert part["lookups_per_s"]["least"] > 0
    assert part["throughput"][0]["keys_per_s"]["least"] > 0
    (row,) = part["propagation"]
    assert row["watchers"] == 3
    assert 0 < row["p50_ms"]["median"] <= row["p99_ms"]["median"]
    assert "| 3 | " in tracker.markdown(part)

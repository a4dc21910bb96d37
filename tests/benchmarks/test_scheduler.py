"""What is timed is what it is called, and nothing is left of it."""

from __future__ import annotations

import pytest

from benchmarks import scheduler
from benchmarks.figures import MIN_SAMPLES


def test_every_call_of_a_prompts_life_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CHUNKS": 20,
        "PEERS": (1, 3),
        "SLOTS": 200,
        "KNOWN_KEYS": 1000,
        "ROUNDS": MIN_SAMPLES,
    }.items():
        monkeypatch.setattr(scheduler, name, value)
    part = scheduler.measure()
    for row in part["peers"]:
        for name in ("miss_us", "hit_us", "pending_us", "dict_us", "attempt_ms"):
            assert len(row[name]["samples"]) == MIN_SAMPLES
        assert {"on_schedule_end", "prepare_load", "prepare_store"} < set(row["calls_ms"])
        slowest = max(value["median"] for value in row["calls_ms"].values())
        assert row["longest_ms"]["median"] >= slowest
    assert "| hit, µs per chunk |" in scheduler.markdown(part)

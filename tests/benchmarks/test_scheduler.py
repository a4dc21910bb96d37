"""What is timed is what it is called, and nothing is left of it."""

from __future__ import annotations

import pytest

from benchmarks import scheduler
from benchmarks.figures import MIN_SAMPLES


def test_every_call_of_a_prompts_life_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ROUNDS", MIN_SAMPLES)
    monkeypatch.setattr(scheduler, "KNOWN_KEYS", 1000)
    part = scheduler.measure()
    for name in ("miss", "hit", "pending", "dict"):
        assert len(part[f"{name}_us"]["samples"]) == MIN_SAMPLES
    assert {"on_schedule_end", "prepare_load", "prepare_store"} < set(part["calls_ms"])
    slowest = max(value["median"] for value in part["calls_ms"].values())
    assert part["longest_ms"]["median"] >= slowest
    assert "| hit |" in scheduler.markdown(part)

"""The router is compared with every other choice, at every size and load."""

from __future__ import annotations

import pytest

from benchmarks import bars, routing


def test_the_earliest_finish_is_the_best_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in routing.QUICK.items():
        monkeypatch.setattr(routing, name, value)
    part = routing.measure()
    assert len(part["runs"]) == 2 * (len(routing.LOADS) + 1)
    for run in part["runs"]:
        assert run["requests"] == routing.REQUESTS
        ours, today = (run["policies"][name] for name in (routing.OURS, routing.TODAY))
        assert ours["mean_s"] < today["mean_s"]
        assert run["ideal_s"] < ours["mean_s"]
        assert ours["local"] + ours["fetched"] + ours["computed"] == pytest.approx(1)
        assert run["policies"]["in turn, not shared"]["moved_bytes"] == 0
    assert max(run["mean/best"] for run in part["runs"]) < 1.05
    assert "| conversation | 4 | 0.8, ± 100% |" in routing.markdown(part)
    assert len(bars.judge("routing", part)) == 3

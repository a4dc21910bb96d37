"""A small run of the comparison with other routers."""

from statistics import fmean

import pytest

from benchmarks import bars, routing, traces


def test_ours_gives_the_first_token_as_soon_as_the_best_other_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in routing.QUICK.items():
        monkeypatch.setattr(routing, name, value)
    part = routing.measure()
    runs = {
        name: [run for run in part["runs"] if run["trace"] == name]
        for name in (*traces.NAMES, "rounds", "common")
    }
    assert {len(runs[name]) for name in traces.NAMES} == {len(routing.LOADS) + 1}
    assert (len(runs["rounds"]), len(runs["common"])) == (len(routing.ROUNDS_LOADS), 1)
    for run in part["runs"]:
        ours = run["policies"][routing.OURS]
        assert ours["local"] + ours["fetched"] + ours["computed"] == pytest.approx(1)
        assert run["policies"]["in turn, not shared"]["moved_bytes"] == 0
        if run["trace"] != "common":
            assert run["ideal_s"] < ours["first_mean_s"]
            assert run["against_today"]["first_mean_s"] < 1
    played = [run for name in traces.NAMES for run in runs[name]]
    assert fmean(run["against_best"]["first_mean_s"] for run in played) < 1.02
    assert "| conversation, 4 × 0.8, ± 100% | in turn |" in routing.markdown(part)
    assert len(bars.judge("routing", part)) == 5

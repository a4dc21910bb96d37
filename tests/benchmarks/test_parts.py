"""A small run of each part that needs no engine: everything is measured and compared."""

from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

from benchmarks import bars, fetch, routing, scheduler, traces, tracker, transport
from benchmarks.figures import MIN_SAMPLES


def measured(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **values: Any) -> dict[str, Any]:
    """What a module measures with other values of some of its constants."""
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)
    part: dict[str, Any] = module.measure()
    return part


@pytest.mark.process
def test_every_fetch_is_compared_with_the_least_time_for_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = measured(monkeypatch, fetch, ROWS={1: (2, 3)}, ROUNDS=MIN_SAMPLES)
    found = [(size["transport"], size["row_bytes"], size["rows"]) for size in part["sizes"]]
    assert found == [(name, 1 << 20, rows) for name in ("gloo", "shared_memory") for rows in (2, 3)]
    for size in part["sizes"]:
        samples = zip(
            *(size[name]["samples"] for name in ("fetch_ms", "floor_ms", "ratio")), strict=True
        )
        for whole, floor, ratio in samples:
            assert floor > 0
            assert ratio == pytest.approx(whole / (floor + fetch.ALLOWED_MS))
    lines = fetch.markdown(part).splitlines()
    assert lines[-1].startswith("| shared memory | 3 × 1 MiB | ")
    assert lines[-1].count("|") == lines[-3].count("|")


def test_ours_gives_the_first_token_as_soon_as_the_best_other_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = measured(monkeypatch, routing, **routing.QUICK)
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


def test_every_call_of_a_prompts_life_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    part = measured(
        monkeypatch,
        scheduler,
        CHUNKS=20,
        PEERS=(1, 3),
        SLOTS=200,
        KNOWN_KEYS=1000,
        ROUNDS=MIN_SAMPLES,
    )
    for row in part["peers"]:
        for name in ("miss_us", "hit_us", "pending_us", "dict_us", "attempt_ms"):
            assert len(row[name]["samples"]) == MIN_SAMPLES
        assert {"on_schedule_end", "prepare_load", "prepare_store"} < set(row["calls_ms"])
        slowest = max(value["median"] for value in row["calls_ms"].values())
        assert row["longest_ms"]["median"] >= slowest
    assert "| hit, µs per chunk |" in scheduler.markdown(part)


@pytest.mark.process
def test_keys_reach_the_mirror_and_the_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    part = measured(
        monkeypatch, tracker, KEYS=20_000, LOOKUPS=1000, REPLICAS=(3,), SECONDS=0.1, PUBLICATIONS=10
    )
    assert part["lookups_per_s"]["least"] > 0
    assert part["throughput"][0]["keys_per_s"]["least"] > 0
    (row,) = part["propagation"]
    assert row["watchers"] == 3
    assert 0 < row["p50_ms"]["median"] <= row["p99_ms"]["median"]
    assert "| 3 | " in tracker.markdown(part)


@pytest.mark.process
def test_every_way_of_moving_rows_is_compared_with_its_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = measured(
        monkeypatch, transport, ROW_MIB=(1,), PAIRS=(1,), ROUNDS=MIN_SAMPLES, BATCH_BYTES=4 << 20
    )
    (row,) = part["rows"]
    assert (row["row_bytes"], row["pairs"]) == (1 << 20, 1)
    for name in ("gloo", "tcp", "gloo/tcp", "shared_memory", "memcpy", "shared_memory/memcpy"):
        assert row[name]["least"] > 0
        assert len(row[name]["samples"]) == MIN_SAMPLES
    lines = transport.markdown(part).splitlines()
    assert lines[-1].startswith("| 1 MiB | 1 | ")
    assert lines[-1].count("|") == lines[-3].count("|")

"""Sums of the replicas' counts, sampled over an hour."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from xinference_xavier.stats import report as module
from xinference_xavier.stats.report import INTERVAL, MAX_SAMPLES, History


def stats(peers: int) -> dict[str, Any]:
    return {
        "hits": {"prefix_cache": 1, "local_pool": 2, "remote": peers, "computed": 4},
        "bytes_received": 10 * peers,
        "requests": 5,
        "seconds_saved": 0.5,
        "fetches": {"started": 7, "committed": 6, "rolled_back": {"timeout": 1, "link": 2}},
    }


def last(history: History) -> dict[str, Any]:
    sample: dict[str, Any] = history.to_dict()["samples"][-1]
    return sample


def test_a_sample_sums_up_all_replicas() -> None:
    history = History()
    history.record("a", stats(3))
    history.record("b", stats(30))
    history.tick(0.0, 1000.0)
    assert last(history) == {
        "time": 1000.0,
        "hits": {"prefix_cache": 2, "local_pool": 4, "remote": 33, "computed": 8},
        "bytes_received": 330,
        "bytes_sent": 0,
        "requests": 10,
        "seconds_saved": 1.0,
        "fetches": {"started": 14, "committed": 12, "rolled_back": {"any": 6}},
    }


def test_a_replica_s_report_replaces_its_last_one() -> None:
    history = History()
    for peers in (3, 4):
        history.record("a", stats(peers))
    history.tick(0.0, 0.0)
    assert last(history)["hits"]["remote"] == 4


def test_samples_are_an_interval_apart_and_reach_an_hour_back() -> None:
    history = History()
    for second in range(4000):
        history.tick(float(second), float(second))
    samples = history.to_dict()["samples"]
    assert len(samples) == MAX_SAMPLES == 3600 / INTERVAL
    times = [sample["time"] for sample in samples]
    assert {after - before for before, after in itertools.pairwise(times)} == {INTERVAL}
    assert samples[-1]["time"] == 3990.0


def test_sums_never_fall_however_many_replicas_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that comes back is not counted twice."""
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    history = History()
    for number in range(10):
        history.record(str(number), stats(1))
        history.record(str(number), stats(2))
    assert len(history._latest) == 3
    history.tick(0.0, 0.0)
    assert last(history)["hits"]["remote"] == 20


@pytest.mark.parametrize(
    "nonsense",
    [
        {},
        {"hits": None, "fetches": [1]},
        {"hits": {"remote": "many"}, "requests": -1, "bytes_received": True},
        {"seconds_saved": math.inf, "requests": math.nan, "fetches": {"rolled_back": {"a": "b"}}},
    ],
)
def test_anything_but_a_number_counts_as_zero(nonsense: dict[str, Any]) -> None:
    """Figures come from peers, and must not break the tracker's report."""
    history = History()
    history.record("a", nonsense)
    history.tick(0.0, 0.0)
    sample = json.loads(json.dumps(last(history), allow_nan=False))
    assert sample.pop("fetches")["rolled_back"] == {"any": 0}
    assert set(sample.pop("hits").values()) == set(sample.values()) == {0}

"""The figures that replicas report: each fetch and each observation counts once, and a client reads
the answers of older and newer servers."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.errors import ROLLBACKS
from xinference_xavier.replica import donor, fetcher, transfer_process
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import (
    BYTES_BOUNDS,
    SECONDS_BOUNDS,
    Counters,
    Decisions,
    FetchStats,
    Histogram,
    Hits,
    KnownLoad,
    ModelStatus,
    PoolStats,
    ReplicaFetches,
    ReplicaStatus,
    RoutingStats,
    TrackerStats,
    WaitCounts,
)
from xinference_xavier.transfer import links
from xinference_xavier.transfer.links import ChecksumError

API = Path(__file__).parents[2] / "docs" / "api.md"

REPLICA: dict[str, Any] = {"incarnation": "a", "address": "10.0.0.1:1", "namespace": "n"}


def status(**replica: Any) -> ModelStatus:
    raw = {"model_uid": "m", "enabled": True, "replicas": [REPLICA | replica], "totals": {}}
    return read(ModelStatus, raw)


def test_before_the_first_request_nothing_was_reused() -> None:
    assert Hits().ratio == 0.0
    assert Hits(prefix_cache=1, local_pool=2, remote=3, computed=2).ratio == 0.75
    assert Hits(computed=9).ratio == 0.0


def test_fields_that_an_older_server_lacks_have_their_defaults() -> None:
    (replica,) = status().replicas
    assert replica.replica == "a", "it has no other name"
    assert read(Counters, {}) == Counters()
    assert (replica.hits, replica.requests, replica.bytes_received) == (Hits(), 0, 0)
    assert (replica.stale, replica.pool.rows, replica.prefill_tokens_per_s) == (False, 0, None)
    assert (replica.received_from, replica.fetching) == ({}, {})


def test_fields_that_only_a_newer_server_has_are_in_raw() -> None:
    answer = status(colour="red", hits={"remote": 5, "moon": 7})
    (replica,) = answer.replicas
    assert replica.hits == Hits(remote=5)
    assert replica.raw["colour"] == "red"
    assert answer.raw["replicas"][0]["hits"]["moon"] == 7


@pytest.mark.parametrize("name", ["incarnation", "address", "namespace"])
def test_fields_that_every_server_has_are_required(name: str) -> None:
    raw = {key: value for key, value in REPLICA.items() if key != name}
    with pytest.raises(KeyError):
        read(ModelStatus, {"model_uid": "m", "enabled": True, "replicas": [raw], "totals": {}})


def test_rows_in_use_are_those_that_are_ready_or_being_filled() -> None:
    pool = {"rows": 9, "ready": 4, "filling": 2, "pinned": 1, "quarantined": 3, "row_bytes": 64}
    (replica,) = status(pool=pool).replicas
    assert (replica.pool.rows, replica.pool.used, replica.pool.pinned) == (9, 6, 1)


@pytest.mark.parametrize(
    "kind",
    [
        *(ReplicaStatus, Hits, ReplicaFetches, Decisions, WaitCounts, PoolStats, TrackerStats),
        *(RoutingStats, KnownLoad),
    ],
)
def test_every_field_is_documented(kind: type[Any]) -> None:
    page = API.read_text()
    missing = {each.name for each in fields(kind) if f"`{each.name}`" not in page}
    assert missing <= {"raw", "transfer_pid"}


@pytest.mark.parametrize(("value", "bucket"), [(0, 0), (1, 0), (1.5, 1), (2, 1), (2.1, 2), (99, 2)])
def test_a_bucket_includes_its_bound(value: float, bucket: int) -> None:
    histogram = Histogram.over((1.0, 2.0))
    histogram.observe(value, (1.0, 2.0))
    assert histogram.counts.index(1) == bucket


@given(st.lists(st.integers(0, 1000)))
def test_every_observation_is_in_one_bucket(values: list[int]) -> None:
    bounds = (10.0, 100.0)
    histogram = Histogram.over(bounds)
    for value in values:
        histogram.observe(value, bounds)
    assert json.loads(json.dumps(asdict(histogram))) == {
        "counts": [
            sum(value <= 10 for value in values),
            sum(10 < value <= 100 for value in values),
            sum(value > 100 for value in values),
        ],
        "sum": sum(values),
    }


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, BYTES_BOUNDS])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def told(*ended: tuple[str | None, float, int]) -> dict[str, Any]:
    stats = FetchStats()
    for reason, seconds, size in ended:
        stats.ended(reason, seconds, size)
    as_told: dict[str, Any] = json.loads(json.dumps(asdict(stats)))
    return as_told


def test_seconds_by_outcome() -> None:
    seconds = told((None, 0.5, 1), (None, 0.25, 1), ("timeout", 5.0, 0))["seconds"]
    assert {outcome: sum(seen["counts"]) for outcome, seen in seconds.items()} == {
        "committed": 2,
        "rolled_back": 1,
    }
    assert {outcome: seen["sum"] for outcome, seen in seconds.items()} == {
        "committed": 0.75,
        "rolled_back": 5.0,
    }


def test_sizes_of_whole_and_partial_fetches() -> None:
    size = told((None, 1.0, 100), ("link", 1.0, 50), ("link", 1.0, 0))["bytes"]
    assert (sum(size["counts"]), size["sum"]) == (2, 150)


def test_reasons() -> None:
    assert told((None, 1.0, 1), ("link", 1.0, 0), ("link", 1.0, 0))["reasons"] == {"link": 2}


_BEFORE = r"GrantRefusedError\(|PullResult\(0, |_finish\(fetch, |reason(?:: [^=]+)? = |else "
REASON = re.compile(rf'(?:{_BEFORE})"([a-z ]+)"')


def test_metrics_know_every_reason() -> None:
    """They would show any other as "other"."""
    given = {
        reason
        for module in (fetcher, links, transfer_process, donor)
        for reason in REASON.findall(inspect.getsource(module))
    } | {links._reason(error) for error in (ChecksumError(), TimeoutError(), OSError())}
    assert {"timeout", "checksum", "busy", "stopped", "donor gone", "refused", "link"} <= given
    assert given <= set(ROLLBACKS)

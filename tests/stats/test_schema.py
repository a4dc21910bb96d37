"""What a client makes of a server's answers, older and newer ones among them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from xinference_xavier.stats.reading import read
from xinference_xavier.stats.schema import (
    Counters,
    Decisions,
    Hits,
    ModelStatus,
    PoolStats,
    ReplicaFetches,
    ReplicaStatus,
    TrackerStats,
    WaitCounts,
)

API = Path(__file__).parents[2] / "docs" / "api.md"

REPLICA: dict[str, Any] = {"incarnation": "a", "address": "10.0.0.1:1", "namespace": "n"}


def status(**replica: Any) -> ModelStatus:
    raw = {"model_uid": "m", "enabled": True, "replicas": [REPLICA | replica], "totals": {}}
    return read(ModelStatus, raw)


def test_before_the_first_request_nothing_was_reused() -> None:
    assert Hits().ratio == 0.0
    assert Hits(prefix_cache=1, local_pool=2, remote=3, computed=2).ratio == 0.75
    assert Hits(computed=9).ratio == 0.0


def test_what_an_older_server_does_not_say_counts_as_nothing() -> None:
    (replica,) = status().replicas
    assert replica.replica == "a", "for want of a name"
    assert read(Counters, {}) == Counters()
    assert (replica.hits, replica.requests, replica.bytes_received) == (Hits(), 0, 0)
    assert (replica.stale, replica.pool.rows, replica.prefill_tokens_per_s) == (False, 0, None)
    assert (replica.received_from, replica.fetching) == ({}, {})


def test_what_a_newer_server_says_besides_is_in_raw() -> None:
    answer = status(colour="red", hits={"remote": 5, "moon": 7})
    (replica,) = answer.replicas
    assert replica.hits == Hits(remote=5)
    assert replica.raw["colour"] == "red"
    assert answer.raw["replicas"][0]["hits"]["moon"] == 7


@pytest.mark.parametrize("name", ["incarnation", "address", "namespace"])
def test_what_every_server_says_is_not_made_up(name: str) -> None:
    raw = {key: value for key, value in REPLICA.items() if key != name}
    with pytest.raises(KeyError):
        read(ModelStatus, {"model_uid": "m", "enabled": True, "replicas": [raw], "totals": {}})


def test_rows_in_use_are_those_that_are_ready_and_those_being_filled() -> None:
    pool = {"rows": 9, "ready": 4, "filling": 2, "pinned": 1, "quarantined": 3, "row_bytes": 64}
    (replica,) = status(pool=pool).replicas
    assert (replica.pool.rows, replica.pool.used, replica.pool.pinned) == (9, 6, 1)


@pytest.mark.parametrize(
    "kind", [ReplicaStatus, Hits, ReplicaFetches, Decisions, WaitCounts, PoolStats, TrackerStats]
)
def test_every_field_is_documented(kind: type[Any]) -> None:
    page = API.read_text()
    missing = {each.name for each in fields(kind) if f"`{each.name}`" not in page}
    assert missing <= {"raw", "transfer_pid"}

"""What replicas report: each fetch and each observation is counted once, and a client reads the
answers of older and newer servers."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.errors import ROLLBACKS
from xinference_xavier.replica import donor, fetcher, transfer_process
from xinference_xavier.stats.schema import (
    BYTES_BOUNDS,
    SECONDS_BOUNDS,
    Chunk,
    Counts,
    EventRecord,
    Explanation,
    FetchStats,
    Histogram,
    Hits,
    ModelStatus,
    Reuse,
)
from xinference_xavier.transfer import receiver
from xinference_xavier.transfer.receiver import ChecksumError

REPLICA: dict[str, Any] = {"incarnation": "a", "address": "10.0.0.1:1", "namespace": "n"}


def status(**replica: Any) -> ModelStatus:
    raw = {"model_uid": "m", "enabled": True, "replicas": [REPLICA | replica], "totals": {}}
    return ModelStatus.of(raw)


def test_before_the_first_request_nothing_was_reused() -> None:
    assert Hits().ratio == 0.0
    assert Hits(prefix_cache=1, local_pool=2, remote=3, computed=2).ratio == 0.75
    assert Hits(computed=9).ratio == 0.0


def test_what_an_older_server_does_not_say_counts_as_nothing() -> None:
    (replica,) = status().replicas
    assert replica.replica == "a", "for want of a name"
    assert replica.counts == Counts()
    assert (replica.stale, replica.rows, replica.prefill_tokens_per_s) == (False, 0, None)
    assert (replica.received_from, replica.fetching) == ({}, {})


def test_what_a_newer_server_says_besides_is_in_raw() -> None:
    answer = status(colour="red", hits={"remote": 5, "moon": 7})
    (replica,) = answer.replicas
    assert replica.counts.hits == Hits(remote=5)
    assert replica.raw["colour"] == "red"
    assert answer.raw["replicas"][0]["hits"]["moon"] == 7


@pytest.mark.parametrize("name", ["incarnation", "address", "namespace"])
def test_what_every_server_says_is_not_made_up(name: str) -> None:
    raw = {key: value for key, value in REPLICA.items() if key != name}
    with pytest.raises(KeyError):
        ModelStatus.of({"model_uid": "m", "enabled": True, "replicas": [raw], "totals": {}})


def test_rows_in_use_are_those_that_are_ready_and_those_being_filled() -> None:
    pool = {"rows": 9, "ready": 4, "filling": 2, "pinned": 1, "quarantined": 3, "row_bytes": 64}
    (replica,) = status(pool=pool).replicas
    assert (replica.rows, replica.rows_used, replica.rows_pinned) == (9, 6, 1)


def test_an_event_keeps_all_fields_of_its_own() -> None:
    raw = {"event": "FromTheFuture", "time": 1.5, "model_uid": "m", "wings": 2}
    assert EventRecord.of(raw) == EventRecord("FromTheFuture", 1.5, {"model_uid": "m", "wings": 2})


def test_holders_of_a_chunk_are_all_that_have_it_anywhere() -> None:
    """In a pool today; in another place, perhaps, later."""
    raw = {
        "prompt_tokens": 300,
        "chunk_tokens": 128,
        "chunks": [
            {"from": 0, "to": 128, "replicas": {"a": "pool", "b": "none", "c": "disk"}},
            {"from": 128, "to": 256, "replicas": {}},
        ],
        "reuse": {"a": {"local_pool": 128, "remote": 0, "computed": 172}},
    }
    explanation = Explanation.of(raw)
    assert explanation.chunks == (
        Chunk(0, 128, frozenset("ac")),
        Chunk(128, 256, frozenset()),
    )
    assert explanation.reuse == {"a": Reuse(128, 0, 172)}


@pytest.mark.parametrize(("value", "bucket"), [(0, 0), (1, 0), (1.5, 1), (2, 1), (2.1, 2), (99, 2)])
def test_a_bound_belongs_to_its_own_bucket(value: float, bucket: int) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    assert histogram.counts.index(1) == bucket


@given(st.lists(st.integers(0, 1000)))
def test_nothing_is_lost(values: list[int]) -> None:
    histogram = Histogram((10.0, 100.0))
    for value in values:
        histogram.observe(value)
    told = json.loads(json.dumps(histogram.to_dict()))
    assert told == {
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
    figures = FetchStats()
    for reason, seconds, size in ended:
        figures.ended(reason, seconds, size)
    as_told: dict[str, Any] = json.loads(json.dumps(figures.to_dict()))
    return as_told


def test_time_by_outcome() -> None:
    seconds = told((None, 0.5, 1), (None, 0.25, 1), ("timeout", 5.0, 0))["seconds"]
    assert {outcome: sum(seen["counts"]) for outcome, seen in seconds.items()} == {
        "committed": 2,
        "rolled_back": 1,
    }
    assert {outcome: seen["sum"] for outcome, seen in seconds.items()} == {
        "committed": 0.75,
        "rolled_back": 5.0,
    }


def test_size_of_what_came_whether_all_of_it_did_or_not() -> None:
    size = told((None, 1.0, 100), ("link", 1.0, 50), ("link", 1.0, 0))["bytes"]
    assert (sum(size["counts"]), size["sum"]) == (2, 150)


def test_reasons() -> None:
    assert told((None, 1.0, 1), ("link", 1.0, 0), ("link", 1.0, 0))["reasons"] == {"link": 2}


_BEFORE = r"GrantRefusedError\(|PullResult\(0, |_finish\(fetch, |reason(?:: [^=]+)? = |else "
REASON = re.compile(rf'(?:{_BEFORE})"([a-z ]+)"')


def test_every_reason_is_one_that_metrics_know() -> None:
    """Another would be shown as "other"."""
    given = {
        reason
        for module in (fetcher, receiver, transfer_process, donor)
        for reason in REASON.findall(inspect.getsource(module))
    } | {receiver._reason(error) for error in (ChecksumError(), TimeoutError(), OSError())}
    assert {"timeout", "checksum", "busy", "stopped", "donor gone", "refused", "link"} <= given
    assert given <= set(ROLLBACKS)

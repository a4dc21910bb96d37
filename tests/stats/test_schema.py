"""What a client makes of a server's answers, older and newer ones among them."""

from __future__ import annotations

from typing import Any

import pytest

from xinference_xavier.stats.schema import (
    Chunk,
    Counts,
    EventRecord,
    Explanation,
    Hits,
    ModelStatus,
    Reuse,
)

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

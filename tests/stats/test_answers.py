"""How a client reads answers about events and prompts."""

from xinference_xavier.stats.answers import (
    Chunk,
    EventRecord,
    Explanation,
    Forecast,
    NamedPrefix,
    PrefixCopy,
    Reuse,
)


def test_an_event_keeps_all_of_its_fields() -> None:
    raw = {"event": "FromTheFuture", "time": 1.5, "model_uid": "m", "wings": 2}
    assert EventRecord.of(raw) == EventRecord("FromTheFuture", 1.5, {"model_uid": "m", "wings": 2})


def test_holders_of_a_chunk_are_those_of_every_place() -> None:
    raw = {
        "prompt_tokens": 300,
        "chunk_tokens": 128,
        "chunks": [
            {"from": 0, "to": 128, "replicas": {"a": "pool", "b": "none", "c": "disk"}},
            {"from": 128, "to": 256, "replicas": {}},
        ],
        "reuse": {"a": {"local_pool": 128, "disk": 0, "remote": 0, "computed": 172}},
    }
    explanation = Explanation.of(raw)
    assert explanation.chunks == (
        Chunk(0, 128, frozenset("ac")),
        Chunk(128, 256, frozenset()),
    )
    assert explanation.reuse == {"a": Reuse(local_pool=128, computed=172)}
    assert (explanation.forecasts, explanation.first) == ({}, ""), "it comes from an older server"


def test_the_replica_that_answers_first_has_the_least_to_do_in_all() -> None:
    raw = {
        "prompt_tokens": 1,
        "chunk_tokens": 128,
        "chunks": [],
        "reuse": {},
        "routing": {
            "m-0": {"backlog": 0.25, "fetch": 0.0, "compute": 2.0},
            "m-1": {"backlog": 0.5, "fetch": 0.5, "compute": 1.0},
        },
    }
    explanation = Explanation.of(raw)
    assert explanation.forecasts == {"m-0": Forecast(0.25, 0.0, 2.0), "m-1": Forecast(0.5, 0.5, 1)}
    assert [each.total for each in explanation.forecasts.values()] == [2.25, 2.0]
    assert explanation.first == "m-1"


def test_a_prefix_of_a_later_server_may_have_more_fields() -> None:
    raw = {
        **{"name": "guide", "state": "kept", "reason": "", "tokens": 300, "chunks": 2},
        **{"ttl": 60.0, "copies": 1, "retention": "soft", "wings": 2},
        **{"created": 1.0, "used": 2.0, "expires": 62.0},
        "replicas": {"m-0": {"tokens": 300, "chunks": 2, "held": 1, "feathers": 3}},
    }
    prefix = NamedPrefix.of(raw)
    assert (prefix.name, prefix.raw["wings"]) == ("guide", 2)
    assert prefix.replicas == {"m-0": PrefixCopy(300, 2, 1)}

"""How a client reads answers about events and prompts."""

import pytest

from xinference_xavier.stats.answers import (
    Chunk,
    EventRecord,
    Explanation,
    NamedPrefix,
    PrefixCopy,
)


def test_an_event_keeps_all_of_its_fields() -> None:
    raw = {"event": "FromTheFuture", "time": 1.5, "model_uid": "m", "wings": 2}
    assert EventRecord.from_json(raw) == EventRecord(
        "FromTheFuture", 1.5, {"model_uid": "m", "wings": 2}
    )


def test_holders_of_a_chunk_are_those_of_every_place() -> None:
    raw = {
        "prompt_tokens": 300,
        "chunk_tokens": 128,
        "chunks": [
            {"from": 0, "to": 128, "replicas": {"a": "pool", "b": "none", "c": "disk"}},
            {"from": 128, "to": 256, "replicas": {}},
        ],
    }
    explanation = Explanation.from_json(raw)
    assert explanation.chunks == (
        Chunk(0, 128, frozenset("ac")),
        Chunk(128, 256, frozenset()),
    )
    assert {name: explanation.held(name) for name in "abc"} == {"a": 128, "b": 0, "c": 128}


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("", "it is shorter than a chunk of 10"),
        ("-x", "no replica holds its first chunk: no prompt that began like this was computed"),
        ("xx-x", "no replica holds tokens 20 to 30: from there on it differs"),
        ("xx", ""),
    ],
)
def test_it_says_why_a_part_is_missing(held: str, why: str) -> None:
    chunks = tuple(
        Chunk(10 * at, 10 * at + 10, frozenset("a" if each == "x" else ""))
        for at, each in enumerate(held)
    )
    missing = Explanation(10 * len(held) + 9, 10, chunks).missing
    assert missing.startswith(why)
    assert bool(missing) is bool(why)


def test_a_prefix_of_a_later_server_may_have_more_fields() -> None:
    raw = {
        **{"name": "guide", "state": "kept", "reason": "", "tokens": 300, "chunks": 2},
        **{"ttl": 60.0, "copies": 1, "retention": "soft", "wings": 2},
        **{"created": 1.0, "used": 2.0, "expires": 62.0},
        "replicas": {"m-0": {"tokens": 300, "chunks": 2, "held": 1, "feathers": 3}},
    }
    prefix = NamedPrefix.from_json(raw)
    assert (prefix.name, prefix.raw["wings"]) == ("guide", 2)
    assert prefix.replicas == {"m-0": PrefixCopy(300, 2, 1)}

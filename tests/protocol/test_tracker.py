"""Messages between a replica and its tracker are checked where they arrive."""

from typing import Any

import pytest

from xinference_xavier.protocol.tracker import (
    pack,
    pack_question,
    replica_name,
    unpack,
    unpack_question,
    without_rank,
)


def test_unpacked_keys_are_those_that_were_packed_in_order() -> None:
    keys = [b"key2", b"key1", b"key3"]
    assert unpack(pack(keys), 4) == keys
    assert unpack(pack([]), 4) == []
    with pytest.raises(ValueError, match="not a multiple of key length 5"):
        unpack(pack(keys), 5)


@pytest.mark.parametrize(
    "question",
    [
        {"prompt": "why?"},
        {"messages": [{"role": "user", "content": "why?"}]},
        {"messages": [{"role": "user", "content": "why?"}], "tools": [{"name": "look"}]},
        {"prompt": "why?", "cache_salt": "a"},
        {"messages": [{"role": "user", "content": "why?"}], "cache_salt": "a"},
    ],
)
def test_a_question_is_a_prompt_or_a_chat(question: dict[str, Any]) -> None:
    """It travels as bytes: xoscar would walk through objects, and a question may have millions."""
    assert unpack_question(pack_question(question)) == question


@pytest.mark.parametrize(
    "wrong", [None, {"messages": [{"role": "user", "content": "why?"}], "tools": "question"}]
)
def test_any_other_question_is_refused(wrong: object) -> None:
    """`tests/serving/test_bodies.py` has more."""
    with pytest.raises(ValueError, match=r"question|tools"):
        pack_question(wrong)


@pytest.mark.parametrize(
    ("replica", "engine_id", "name"),
    [
        ("model-rep1", "2f6a_dp0", "model-rep1_dp0"),
        ("model-rep1", "2f6a_dp11", "model-rep1_dp11"),
        ("model-rep1", "2f6a", "model-rep1"),
        ("", "2f6a_dp0", ""),
    ],
)
def test_each_engine_of_a_replica_has_a_name(
    monkeypatch: pytest.MonkeyPatch, replica: str, engine_id: str, name: str
) -> None:
    monkeypatch.setenv("XINFERENCE_MODEL_UID", replica)
    assert replica_name(engine_id) == name
    assert without_rank(name) == replica


def test_without_xinference_a_replica_has_the_name_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XINFERENCE_MODEL_UID", raising=False)
    assert replica_name("2f6a", None) == ""
    assert replica_name("2f6a", "a") == "a"
    assert replica_name("2f6a_dp1", "a") == "a_dp1"
    monkeypatch.setenv("XINFERENCE_MODEL_UID", "model-rep1")
    assert replica_name("2f6a", "a") == "model-rep1"

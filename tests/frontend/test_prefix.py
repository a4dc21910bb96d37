"""What clients say about a prefix is checked, and refused with value, reason and remedy."""

import json
from typing import Any

import pytest

from xinference_xavier.frontend.prefix import Terms, read_new, read_terms, read_ttl

MESSAGES = [{"role": "system", "content": "You are a guide."}]


def body(**fields: Any) -> bytes:
    return json.dumps({"name": "guide", "prompt": "text", **fields}).encode()


def test_a_prompt_is_kept_softly_for_an_hour_since_its_last_use() -> None:
    new = read_new(body())
    assert new == ("guide", "", {"prompt": "text"}, Terms(3600.0, 1, "soft"))


def test_it_may_belong_to_an_adapter() -> None:
    new = read_new(body(lora_name="poet"))
    assert new.content == {"prompt": "text", "lora_name": "poet"}
    with pytest.raises(ValueError, match="lora_name=3 is not the name of an adapter"):
        read_new(body(lora_name=3))


def test_messages_may_have_tools() -> None:
    fields = {"messages": MESSAGES, "tools": [{"type": "function"}]}
    new = read_new(json.dumps({"name": "guide", "cache_salt": "tenant", **fields}).encode())
    assert (new.tenant, new.content) == ("tenant", fields)


def test_all_terms_can_be_given() -> None:
    new = read_new(body(ttl="7d", copies="all", retention="hard"))
    assert new.terms == Terms(7 * 86400.0, "all", "hard")


def test_a_change_keeps_what_it_does_not_name() -> None:
    terms = Terms(60.0, "all", "hard")
    assert read_terms(b'{"retention": "soft"}', terms) == Terms(60.0, "all", "soft")


@pytest.mark.parametrize(
    ("value", "seconds"), [("90s", 90), ("30m", 1800), (" 1h", 3600), ("1.5h", 5400), (7, 7)]
)
def test_lifetimes(value: object, seconds: float) -> None:
    assert read_ttl(value) == seconds


@pytest.mark.parametrize("value", ["", "h", "1w", "-1s", 0, -1, "0s", 1e9, "9999d", None, True, []])
def test_wrong_lifetimes(value: object) -> None:
    with pytest.raises(ValueError, match=r"ttl=.* is not a time of at most 366 days; use seconds"):
        read_ttl(value)


WRONG = [
    (b"{", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b"[]", "is not an object; its fields are name, prompt"),
    (body(color="red"), "'color' is not a field; the fields are name, prompt"),
    (body(name=""), "name='' is not a name"),
    (body(name=None), "name=None is not a name"),
    (body(name="x" * 201), "has 201 characters; use at most 200"),
    (body(name="a/b"), "has a slash"),
    (body(name="."), "name='.' has"),
    (body(name=".."), "name='..' has"),
    (body(name="a\nb"), "cannot be printed"),
    (body(prompt=""), "either a prompt or messages"),
    (body(messages=MESSAGES), "either a prompt or messages"),
    (body(prompt=None, messages=[{}]), "is not an object with a role"),
    (body(prompt=["a", "b"]), "the question is neither"),
    (body(tools=[{}]), "tools are a list that goes with messages"),
    (body(copies=2), 'copies=2 is neither 1 nor "all"'),
    (body(copies=True), "copies=True is neither"),
    (body(retention="firm"), "retention='firm' is neither"),
    (body(cache_salt=""), "cache_salt='' is not a text"),
    (body(cache_salt=7), "cache_salt=7 is not a text"),
    (body(cache_salt="x" * 257), "is not a text of 1 to 256 characters"),
    (body(cache_salt="a\n"), "without control characters"),
    (body(cache_salt="\ud800"), "is not a text"),
]


@pytest.mark.parametrize(("sent", "reason"), WRONG)
def test_wrong_bodies(sent: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_new(sent)


def test_a_text_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference_xavier.protocol.tracker.MAX_QUESTION_BYTES", 100)
    with pytest.raises(ValueError, match="question"):
        read_new(body(prompt="x" * 200))

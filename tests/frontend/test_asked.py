"""What goes into a prompt is read from the bodies of all text routes, and nothing a client sends
does any harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xinference_xavier.frontend import asked as module
from xinference_xavier.frontend.asked import prompt_text, read_body, session_of

LONG = "many words " * 200
SYSTEM = {"role": "system", "content": LONG}
USER = {"role": "user", "content": LONG + "a question"}
ANSWER = {"role": "assistant", "content": "an answer " * 100}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "AAAA" * 500}}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def shared(first: dict[str, Any], second: dict[str, Any]) -> int:
    """The leading pieces that two requests have in common."""
    pairs = zip(prompt_text(first).hashes, prompt_text(second).hashes, strict=False)
    return sum(one == other for one, other in pairs)


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [SYSTEM, USER]},
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": [{"type": "text", "text": LONG}, IMAGE]},
            ]
        },
        {"messages": [SYSTEM, USER], "tools": TOOLS},
        {"system": LONG, "messages": [USER]},
        {"system": [{"type": "text", "text": LONG}], "messages": [USER]},
        {"prompt": LONG},
        {"prompt": [LONG, LONG]},
        {"prompt": list(range(3000))},
        {"instructions": LONG, "input": LONG},
        {"input": [USER]},
    ],
)
def test_every_route_has_a_text(request_: dict[str, Any]) -> None:
    text = prompt_text(request_)
    assert len(text.hashes) >= 4
    assert prompt_text({"model": "m", "temperature": 0.1, **request_, "stream": True}) == text


def test_the_next_turn_of_a_chat_begins_with_the_last_one() -> None:
    last = {"messages": [SYSTEM, USER]}
    assert shared(last, {"messages": [SYSTEM, USER, ANSWER, USER]}) == len(prompt_text(last).hashes)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "tenant"},
        {"tools": TOOLS},
        {"messages": [{**SYSTEM, "role": "user"}, USER]},
    ],
)
def test_what_changes_the_beginning_of_a_prompt_changes_its_text(change: dict[str, Any]) -> None:
    request = {"messages": [SYSTEM, USER]}
    assert shared(request, {**request, **change}) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe\x00",
        b'"text"',
        b"[" * 200_000,
        b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": "' + b"x" * module.MAX_BODY + b'"}',
        json.dumps(
            {"messages": {"role": 1}, "tools": 5, "prompt": {"a": [None, True, 1e400]}}
        ).encode(),
        b'{"prompt": "\\ud800", "messages": [[[[]]]], "input": {"": ""}}',
    ],
)
def test_nothing_a_client_sends_does_any_harm(body: bytes) -> None:
    request = read_body(body)
    text = prompt_text(request)
    assert not text.length or len(body) < module.MAX_BODY
    assert session_of(request, None) == ""


def test_a_session_is_named_by_header_or_by_openais_field() -> None:
    request = {"prompt_cache_key": "key"}
    assert session_of(request, None) == "key"
    assert session_of(request, "header") == "header"
    assert session_of({"prompt_cache_key": 5}, None) == ""
    assert len(session_of({}, "x" * 100_000)) <= 256

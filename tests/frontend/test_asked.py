"""What goes into a prompt is read from the bodies of all text routes, and nothing a client sends
does any harm."""

from typing import Any

import pytest

from xinference_xavier.frontend import question as module
from xinference_xavier.frontend.question import (
    Keep,
    prompt_text,
    read_keep,
    read_question,
    session_of,
    with_prefix,
)
from xinference_xavier.routing.texts import PIECE

LONG = "many words " * 200
SYSTEM = {"role": "system", "content": LONG}
USER = {"role": "user", "content": LONG + "a question"}
IMAGE_URL = "data:image/png;base64," + "AAAA" * 500
IMAGE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
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


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "tenant"},
        {"lora_name": "adapter"},
        {"tools": TOOLS},
        {"messages": [{**SYSTEM, "role": "user"}, USER]},
    ],
)
def test_what_changes_the_beginning_of_a_prompt_changes_its_text(change: dict[str, Any]) -> None:
    request = {"messages": [SYSTEM, USER]}
    assert shared(request, {**request, **change}) == 0


def nested(inner: Any) -> Any:
    for _ in range(100_000):
        inner = [inner]
    return inner


def test_how_deep_a_text_is_makes_no_difference() -> None:
    """Nor does it cost more to read: each leaf would pass all levels."""
    assert prompt_text({"prompt": nested(LONG)}) == prompt_text({"prompt": LONG})


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": nested([])},
        {"messages": {"role": 1}, "tools": 5, "prompt": {"a": [None, True, 1e400]}},
        {"prompt": "\ud800", "messages": [[[[]]]], "input": {"": ""}},
    ],
    ids=["deep", "of other types", "strange"],
)
async def test_nothing_a_client_sends_does_any_harm(request_: dict[str, Any]) -> None:
    question = await read_question(request_, 100, None)
    assert (question.session, question.request_id) == ("", "")


def test_a_text_of_too_many_parts_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the parts have no characters."""
    monkeypatch.setattr(module, "MAX_PARTS", 101)
    for part in ([], {}, None, 7):
        assert prompt_text({"prompt": LONG, "input": [part] * 99}).length > 0
        assert prompt_text({"prompt": LONG, "input": [part] * 100}).length == 0


def test_a_tenant_is_no_adapter() -> None:
    assert shared({"prompt": LONG, "cache_salt": "a"}, {"prompt": LONG, "lora_name": "a"}) == 0


def test_a_text_that_is_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"prompt": LONG}
    monkeypatch.setattr(module, "MAX_TEXT", len("prompt") + len(LONG) + 2)
    assert prompt_text(request).length > len(LONG)
    assert prompt_text({"prompt": LONG + "x"}).length == 0
    many = {"type": "image_url", "image_url": [0] * len(LONG)}
    assert prompt_text({"messages": [many]}).length == 0
    content = [{"type": "image_url", "image_url": {"url": IMAGE_URL * 100}}]
    assert prompt_text({"messages": [{"role": "user", "content": content}]}).length > 0


@pytest.mark.parametrize(
    "medium",
    [
        {"type": "image_url", "image_url": {"url": IMAGE_URL}},
        {"type": "image_url", "image_url": {"url": "https://example.org/1.png"}},
        {"image_url": {"url": IMAGE_URL}},
        {"type": "input_audio", "input_audio": {"data": "AAAA" * 500, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "data": "AAAA" * 500}},
        {"type": "video", "video": ["https://example.org/1.png", "https://example.org/2.png"]},
    ],
)
def test_what_is_no_text_is_one_medium_each(medium: dict[str, Any]) -> None:
    def asked(*content: object) -> dict[str, Any]:
        return {"messages": [SYSTEM, {"role": "user", "content": [*content]}]}

    question = {"type": "text", "text": "And this?"}
    one, two = prompt_text(asked(medium, question)), prompt_text(asked(medium, medium, question))
    assert [len(one.media), len(two.media)] == [1, 2]
    assert one.length < two.length < len(LONG) + PIECE
    assert shared(asked(medium), asked(medium, question)) == len(prompt_text(asked(medium)).hashes)
    pieces = one.media[0][0]
    other = {**medium, "type": "image_url", "more": "of another"}
    assert shared(asked(medium, question), asked(other, question)) == pieces - 1


USER_ID = "user_0a1b_account_8d6c-4f_session_5b1f-22"


@pytest.mark.parametrize(
    ("fields", "header", "session"),
    [
        ({"prompt_cache_key": "key"}, None, "key"),
        ({"prompt_cache_key": "key"}, "header", "header"),
        ({"prompt_cache_key": 5}, None, ""),
        ({"metadata": {"user_id": USER_ID}}, None, "5b1f-22"),
        ({"metadata": {"user_id": USER_ID}, "prompt_cache_key": "key"}, None, "key"),
        ({"metadata": {"user_id": '{"device_id": "0a", "session_id": "5b"}'}}, None, "5b"),
        ({"metadata": {"user_id": '{"session_id": {}}'}}, None, ""),
        ({"metadata": {"user_id": "[" * 100_000}}, None, ""),
        ({"metadata": {"user_id": "mallory"}}, None, ""),
        ({"metadata": {"user_id": "7" * 9999}}, None, ""),
        ({"metadata": {"user_id": 7}}, None, ""),
        ({"metadata": [USER_ID]}, None, ""),
        ({}, "x" * 100_000, "x" * 256),
    ],
)
def test_a_session_is_named_by_a_header_or_in_the_body(
    fields: dict[str, Any], header: str | None, session: str
) -> None:
    assert session_of(fields, header) == session


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"max_output_tokens": 5}, 5),
        ({}, 0),
        *(({"max_tokens": wrong}, 0) for wrong in (None, 0, -1, 5.0, True, "5", [5], 10**400)),
    ],
)
async def test_a_request_may_say_how_many_tokens_its_answer_may_have(
    fields: dict[str, Any], most: int
) -> None:
    assert (await read_question({"prompt": "text", **fields}, 100, None)).max_tokens == most


PLAIN = {"prompt": "text", "cache_salt": "tenant"}


@pytest.mark.parametrize(
    ("fields", "header", "keep"),
    [
        ({}, None, Keep("", "tenant")),
        ({"prefix_name": "story"}, None, Keep("story", "tenant")),
        ({}, "story", Keep("story", "tenant")),
        ({"prefix_name": "another"}, "story", Keep("story", "tenant")),
        ({"prompt_cache_retention": "24h"}, None, Keep("", "tenant", 86400.0)),
        ({"prompt_cache_retention": "24h", "request_id": "mine"}, None, Keep("", "tenant")),
        ({"prompt_cache_retention": ["24h"]}, None, Keep("", "tenant")),
    ],
)
def test_what_a_request_says_about_keeping_its_prefix(
    fields: dict[str, Any], header: str | None, keep: Keep
) -> None:
    assert read_keep({**PLAIN, **fields}, header, False) == keep


@pytest.mark.parametrize("name", [7, ["story"], {}, False, ""])
def test_what_cannot_be_a_name_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"prefix_name=.* is not the name of a prefix"):
        read_keep({"prefix_name": name}, None, False)


@pytest.mark.parametrize(
    ("request_", "content", "whole"),
    [
        ({"prompt": "b"}, {"prompt": "a"}, {"prompt": "ab"}),
        ({"input": "b"}, {"prompt": "a"}, {"input": "ab"}),
        ({"prompt": ["b"]}, {"prompt": "a"}, {"prompt": ["b"]}),
        ({"messages": [2]}, {"messages": [1], "tools": [3]}, {"messages": [1, 2], "tools": [3]}),
        ({"messages": [2], "tools": [4]}, {"messages": [1], "tools": [3]},
         {"messages": [1, 2], "tools": [3, 4]}),
        ({"messages": "wrong"}, {"messages": [1]}, {"messages": "wrong"}),
    ],
)  # fmt: skip
def test_a_request_with_its_prefix_is_what_its_client_might_have_sent(
    request_: dict[str, Any], content: dict[str, Any], whole: dict[str, Any]
) -> None:
    found = with_prefix(request_, content)
    assert {name: value for name, value in found.items() if value} == whole

"""A named prefix goes before a request, exactly as if its client had sent it. What a request marks
is kept by the replica that computes it, and its usage says so."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from xinference_xavier.protocol.prefixes import Keeping, keeping_of
from xinference_xavier.serving.model_proxy import ModelProxy, NamedPrefix, WrongKindError, counted

GUIDE = {"role": "system", "content": "You are a guide."}
HELLO = {"role": "user", "content": "Hello"}
PROMPT = {"prompt": "Once upon a time"}
CHAT = {"messages": [GUIDE], "tools": [{"name": "look"}]}


class Model:
    """Answers with what it was asked."""

    uid = "m-0"

    async def generate(self, prompt: Any, config: Any, **kwargs: Any) -> Any:
        return prompt, config, kwargs

    async def chat(self, messages: Any, config: Any, **kwargs: Any) -> Any:
        return messages, config, kwargs

    async def prepare_anthropic_request(self, messages: Any, config: Any) -> Any:
        return {"messages": messages, "generate_config": config}


async def test_messages_go_before_the_messages_and_tools_before_the_tools() -> None:
    model = ModelProxy(Model(), NamedPrefix("guide", CHAT))
    asked = await model.chat([HELLO], {"tools": [{"name": "go"}]}, request_id="r")
    tools = [{"name": "look"}, {"name": "go"}]
    assert asked == ([GUIDE, HELLO], {"tools": tools}, {"request_id": "r"})
    assert await model.chat([HELLO], {}) == ([GUIDE, HELLO], {"tools": [{"name": "look"}]}, {})


@pytest.mark.parametrize("prompts", [["a", "b"], [1, 2]])
def test_it_goes_before_one_prompt_of_text(prompts: Any) -> None:
    """xinference refuses lists of prompts itself, today."""
    with pytest.raises(WrongKindError, match="'it' goes before one prompt of text"):
        NamedPrefix("it", PROMPT).check({"prompt": prompts})


# -- keeping ----------------------------------------------------------------------------------

TOOLS = [{"name": "look"}]
GUIDE_LENGTH, HELLO_LENGTH, TOOLS_LENGTH = (
    len("".join(str(value) for each in items for value in each.values()))
    for items in ([GUIDE], [HELLO], TOOLS)
)


def kept(answer: Any) -> Keeping | None:
    """What the replica is asked to keep."""
    return keeping_of(answer[-1].get("request_id", ""))


async def test_a_whole_prompt_is_kept() -> None:
    model = ModelProxy(Model(), prompt_s=600.0)
    prompt, config, kwargs = await model.generate("text", {}, request_id="r")
    assert (prompt, config) == ("text", {})
    assert kwargs["request_id"].endswith("-r")
    assert kept([kwargs]) == Keeping(600.0, 1.0)
    assert kept(await model.chat([HELLO], {})) == Keeping(600.0, 1.0), "a route may give no id"


async def test_a_request_is_aborted_by_the_id_that_xinference_gave_it() -> None:
    class Aborted(Model):
        async def abort_request(self, name: str, **_: Any) -> str:
            return name

    model = ModelProxy(Aborted(), prompt_s=600.0)
    *_, kwargs = await model.generate("text", {}, request_id="r")
    assert await model.abort_request("r", block_duration=30) == kwargs["request_id"]
    assert await model.abort_request("another") == "another"


@pytest.mark.parametrize(
    ("tools", "share"),
    [
        ({}, (GUIDE_LENGTH + TOOLS_LENGTH) / (GUIDE_LENGTH + HELLO_LENGTH + TOOLS_LENGTH)),
        ({"tools": []}, GUIDE_LENGTH / (GUIDE_LENGTH + HELLO_LENGTH + TOOLS_LENGTH)),
    ],
)
async def test_a_chat_is_kept_up_to_its_mark(tools: Any, share: float) -> None:
    model = ModelProxy(Model())
    marks = {"messages": [GUIDE], "ttl": 300, **tools}
    config = {"tools": TOOLS, "_anthropic_cache_control": marks}
    prepared = await model.prepare_anthropic_request([GUIDE, HELLO], config)
    assert prepared == {"messages": [GUIDE, HELLO], "generate_config": config}
    found = kept(await model.chat([GUIDE, HELLO], {}, request_id="r"))
    assert found is not None
    assert found.seconds == 300
    assert found.share == pytest.approx(share, abs=0.001)


async def test_without_a_mark_nothing_is_kept() -> None:
    model = ModelProxy(Model())
    await model.prepare_anthropic_request([HELLO], {})
    assert await model.chat([HELLO], {}, request_id="r") == ([HELLO], {}, {"request_id": "r"})
    assert await model.generate("text", {}) == ("text", {}, {})
    assert model.uid == "m-0"


USAGE = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 256}}


class Answering(Model):
    async def generate(self, prompt: Any, config: Any, **kwargs: Any) -> Any:
        return json.dumps({"usage": USAGE}).encode()

    async def chat(self, messages: Any, config: Any, **kwargs: Any) -> Any:
        async def stream() -> AsyncIterator[bytes]:
            yield b'data: {"choices": []}\r\n\r\n'
            yield f"data: {json.dumps({'usage': USAGE})}\r\n\r\n".encode()

        return stream()


def created(answer: bytes) -> int | None:
    found: int | None = json.loads(answer.decode().removeprefix("data: "))["usage"].get(
        "cache_creation_input_tokens"
    )
    return found


async def test_usage_says_how_much_is_kept_that_was_in_no_cache() -> None:
    assert created(await ModelProxy(Answering(), prompt_s=600.0).generate("text", {})) == 744


async def streamed(messages: list[Any]) -> bytes:
    model = ModelProxy(Answering())
    marks = {"_anthropic_cache_control": {"messages": [GUIDE], "ttl": 300}}
    await model.prepare_anthropic_request(messages, marks)
    first, last = [item async for item in await model.chat(messages, {})]
    assert first == b'data: {"choices": []}\r\n\r\n'
    assert last.endswith(b"\r\n\r\n")
    found: bytes = last
    return found


async def test_of_what_is_marked_only_that_is_counted() -> None:
    assert created(await streamed([GUIDE])) == 744
    assert created(await streamed([GUIDE, GUIDE])) == 500 - 256
    assert created(await streamed([GUIDE] * 10)) == 0, "it is never negative"


async def test_an_answer_without_a_mark_is_left_alone() -> None:
    answer = await ModelProxy(Answering()).generate("text", {})
    assert answer == await Answering().generate("text", {})


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"data: [DONE]\r\n\r\n",
        b'data: {"error": "prompt_tokens"}\r\n\r\n',
        b'data: {"prompt_tokens": 1',
        b'"prompt_tokens"',
        b'{"usage": {"prompt_tokens": null}}',
        b'{"usage": [{"prompt_tokens": 3}]}',
        '{"text": "\\"prompt_tokens\\": 1"}',
    ],
)
def test_what_has_no_usage_is_left_alone(answer: bytes | str) -> None:
    assert counted(answer, 1.0) == answer  # type: ignore[type-var]


def test_an_answer_keeps_its_kind_and_its_other_fields() -> None:
    """Half a character, as a model's last token may be, among them."""
    answer = json.dumps({"text": "é\ud83d", "usage": {"prompt_tokens": 3}, "id": 1})
    found = counted(answer, 1.0)
    assert json.loads(found) == {
        "text": "é\ud83d",
        "usage": {"prompt_tokens": 3, "cache_creation_input_tokens": 3},
        "id": 1,
    }
    assert counted(answer.encode(), 1.0) == found.encode()

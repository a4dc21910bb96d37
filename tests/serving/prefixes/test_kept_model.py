"""What a request marks is kept by the replica that computes it, and the request goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.serving.prefixes.test_named_model import GUIDE, HELLO, Model
from xinference_xavier.protocol.prefixes import Keeping, keeping_of
from xinference_xavier.serving.prefixes.kept_model import KeptModel

TOOLS = [{"name": "look"}]
GUIDE_LENGTH, HELLO_LENGTH, TOOLS_LENGTH = (
    len("".join(str(value) for each in items for value in each.values()))
    for items in ([GUIDE], [HELLO], TOOLS)
)


def kept(answer: Any) -> Keeping | None:
    """What the replica is asked to keep."""
    return keeping_of(answer[-1].get("request_id", ""))


async def test_a_whole_prompt_is_kept() -> None:
    model = KeptModel(Model(), 600.0)
    prompt, config, kwargs = await model.generate("text", {}, request_id="r")
    assert (prompt, config) == ("text", {})
    assert kwargs["request_id"].endswith("-r")
    assert kept([kwargs]) == Keeping(600.0, 1.0)
    assert kept(await model.chat([HELLO], {})) == Keeping(600.0, 1.0), "a route may give no id"


async def test_a_request_is_aborted_by_the_id_that_xinference_gave_it() -> None:
    class Aborted(Model):
        async def abort_request(self, name: str) -> str:
            return name

    model = KeptModel(Aborted(), 600.0)
    *_, kwargs = await model.generate("text", {}, request_id="r")
    assert await model.abort_request("r") == kwargs["request_id"]
    assert await model.abort_request("another") == "another"


@pytest.mark.parametrize(
    ("tools", "share"),
    [
        ({}, (GUIDE_LENGTH + TOOLS_LENGTH) / (GUIDE_LENGTH + HELLO_LENGTH + TOOLS_LENGTH)),
        ({"tools": []}, GUIDE_LENGTH / (GUIDE_LENGTH + HELLO_LENGTH + TOOLS_LENGTH)),
    ],
)
async def test_a_chat_is_kept_up_to_its_mark(tools: Any, share: float) -> None:
    model = KeptModel(Model(), 0.0)
    marks = {"messages": [GUIDE], "ttl": 300, **tools}
    config = {"tools": TOOLS, "_anthropic_cache_control": marks}
    prepared = await model.prepare_anthropic_request([GUIDE, HELLO], config)
    assert prepared == {"messages": [GUIDE, HELLO], "generate_config": config}
    found = kept(await model.chat([GUIDE, HELLO], {}, request_id="r"))
    assert found is not None
    assert found.seconds == 300
    assert found.share == pytest.approx(share, abs=0.001)


async def test_a_mark_at_the_end_keeps_all_of_it() -> None:
    model = KeptModel(Model(), 0.0)
    marks = {"messages": [GUIDE, HELLO], "ttl": 3600}
    await model.prepare_anthropic_request([GUIDE, HELLO], {"_anthropic_cache_control": marks})
    assert kept(await model.chat([GUIDE, HELLO], {}, request_id="r")) == Keeping(3600, 1.0)


async def test_without_a_mark_nothing_is_kept() -> None:
    model = KeptModel(Model(), 0.0)
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
    assert created(await KeptModel(Answering(), 600.0).generate("text", {})) == 744


async def streamed(messages: list[Any]) -> bytes:
    model = KeptModel(Answering(), 0.0)
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


async def test_it_is_never_negative() -> None:
    assert created(await streamed([GUIDE] * 10)) == 0


async def test_an_answer_without_a_mark_is_left_alone() -> None:
    answer = await KeptModel(Answering(), 0.0).generate("text", {})
    assert answer == await Answering().generate("text", {})

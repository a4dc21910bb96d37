"""What a request marks is kept, and the request goes on unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.serving.prefixes.test_named_model import GUIDE, HELLO, Model
from xinference_xavier.serving.prefixes import kept_model
from xinference_xavier.serving.prefixes.kept_model import KeptModel

TOOLS = [{"name": "look"}]


class Asking:
    def __init__(self, prompt_s: float = 0.0, model: Any = None) -> None:
        self.kept: list[tuple[Any, float]] = []
        self.tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.model = KeptModel(
            model or Model(), lambda *kept: self.kept.append(kept), self.measure, prompt_s
        )

    async def measure(self, content: Any) -> int:
        return await self.tokens


async def test_a_prompt_is_kept() -> None:
    asking = Asking(600.0)
    assert await asking.model.generate("text", {}) == ("text", {}, {})
    await asking.model.generate([1, 2, 3], {})
    assert asking.kept == [({"prompt": "text"}, 600.0)]


async def test_messages_and_tools_are_kept() -> None:
    asking = Asking(600.0)
    assert await asking.model.chat([HELLO], {"tools": TOOLS}) == ([HELLO], {"tools": TOOLS}, {})
    await asking.model.chat([HELLO], {})
    assert asking.kept == [
        ({"messages": [HELLO], "tools": TOOLS}, 600.0),
        ({"messages": [HELLO]}, 600.0),
    ]


async def test_it_is_kept_for_the_adapter_that_is_asked() -> None:
    asking = Asking(600.0)
    await asking.model.generate("text", {"lora_name": "poet"})
    await asking.model.chat([HELLO], {"lora_name": "poet"})
    assert [content["lora_name"] for content, _ in asking.kept] == ["poet", "poet"]


@pytest.mark.parametrize(
    ("tools", "kept"),
    [({}, {"tools": TOOLS}), ({"tools": []}, {}), ({"tools": TOOLS}, {"tools": TOOLS})],
)
async def test_a_chat_is_kept_up_to_its_mark(tools: Any, kept: Any) -> None:
    asking = Asking()
    config = {
        "tools": TOOLS,
        "_anthropic_cache_control": {"messages": [GUIDE], "ttl": 300, **tools},
    }
    prepared = await asking.model.prepare_anthropic_request([GUIDE, HELLO], config)
    assert prepared == {"messages": [GUIDE, HELLO], "generate_config": config}
    await asking.model.chat([GUIDE, HELLO], {})
    assert asking.kept == [({"messages": [GUIDE], **kept}, 300.0)]


async def test_without_a_mark_nothing_is_kept() -> None:
    asking = Asking()
    await asking.model.prepare_anthropic_request([HELLO], {})
    await asking.model.chat([HELLO], {})
    await asking.model.generate("text", {})
    assert asking.kept == []
    assert asking.model.uid == "m-0"


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
    assert created(await Asking(600.0, Answering()).model.generate("text", {})) == 744


async def streamed(asking: Asking, messages: list[Any]) -> bytes:
    marks = {"_anthropic_cache_control": {"messages": [GUIDE], "ttl": 300}}
    await asking.model.prepare_anthropic_request(messages, marks)
    first, last = [item async for item in await asking.model.chat(messages, {})]
    assert first == b'data: {"choices": []}\r\n\r\n'
    assert last.endswith(b"\r\n\r\n")
    found: bytes = last
    return found


async def test_of_what_is_marked_only_that_is_counted() -> None:
    asking = Asking(model=Answering())
    asking.tokens.set_result(600)
    assert created(await streamed(asking, [GUIDE, HELLO])) == 344
    whole = await streamed(Asking(model=Answering()), [GUIDE])
    assert created(whole) == 744, "a whole prompt needs no measuring"


@pytest.mark.parametrize("cached", [0, 1])
async def test_it_is_never_negative(cached: int) -> None:
    asking = Asking(model=Answering())
    asking.tokens.set_result(200 + cached)
    assert created(await streamed(asking, [GUIDE, HELLO])) == 0


async def test_an_answer_does_not_wait_long_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_model, "_PATIENCE", 0.01)
    assert created(await streamed(Asking(model=Answering()), [GUIDE, HELLO])) is None


async def test_an_answer_without_a_mark_is_left_alone() -> None:
    answer = await Asking(model=Answering()).model.generate("text", {})
    assert answer == await Answering().generate("text", {})

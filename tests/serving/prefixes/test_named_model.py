"""A named prefix goes before a request, exactly as if its client had sent it."""

from __future__ import annotations

from typing import Any

import pytest

from xinference_xavier.serving.prefixes.named_model import NamedModel, WrongKindError

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


async def test_a_prompt_goes_before_the_prompt() -> None:
    model = NamedModel(Model(), "story", PROMPT)
    asked = await model.generate(", there", {"n": 1}, request_id="r")
    assert asked == ("Once upon a time, there", {"n": 1}, {"request_id": "r"})


async def test_messages_go_before_the_messages_and_tools_before_the_tools() -> None:
    model = NamedModel(Model(), "guide", CHAT)
    asked = await model.chat([HELLO], {"tools": [{"name": "go"}]}, request_id="r")
    tools = [{"name": "look"}, {"name": "go"}]
    assert asked == ([GUIDE, HELLO], {"tools": tools}, {"request_id": "r"})
    assert await model.chat([HELLO], {}) == ([GUIDE, HELLO], {"tools": [{"name": "look"}]}, {})


async def test_messages_that_were_prepared_with_them_get_them_once() -> None:
    model = NamedModel(Model(), "guide", {"messages": [GUIDE]})
    prepared = await model.prepare_anthropic_request([HELLO], {})
    assert prepared["messages"] == [GUIDE, HELLO]
    assert (await model.chat(prepared["messages"], {}))[0] == [GUIDE, HELLO]


async def test_everything_else_is_the_model_s() -> None:
    assert NamedModel(Model(), "story", PROMPT).uid == "m-0"


async def test_what_belongs_to_another_adapter_is_refused() -> None:
    model = NamedModel(Model(), "story", {**PROMPT, "lora_name": "poet"})
    assert await model.generate("!", {"lora_name": "poet"})
    for config in ({}, {"lora_name": None}, {"lora_name": "clerk"}):
        with pytest.raises(WrongKindError, match="'story' belongs to adapter 'poet'"):
            await model.generate("!", config)
    guide = NamedModel(Model(), "guide", CHAT)
    assert await guide.chat([HELLO], {"lora_name": None})
    with pytest.raises(WrongKindError, match="'guide' belongs to the model without an adapter"):
        await guide.chat([HELLO], {"lora_name": "poet"})


@pytest.mark.parametrize(
    ("content", "method", "asked", "reason"),
    [
        (CHAT, "generate", "text", "'it' has messages; use it on a route of chats"),
        (PROMPT, "generate", ["a", "b"], "'it' goes before one prompt of text"),
        (PROMPT, "generate", [1, 2], "'it' goes before one prompt of text"),
        (PROMPT, "chat", [HELLO], "'it' has a prompt; use it on the route of completions"),
    ],
)
async def test_what_does_not_go_together(
    content: Any, method: str, asked: Any, reason: str
) -> None:
    with pytest.raises(WrongKindError, match=reason):
        await getattr(NamedModel(Model(), "it", content), method)(asked, {})

"""A model's reference for a request that begins with a named prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xinference_xavier.frontend.prefix import LORA


class WrongKindError(ValueError):
    """A prompt cannot begin with messages, nor a chat with a prompt, nor a request to one adapter
    with what belongs to another."""


def check(name: str, content: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Raises WrongKindError unless the prefix can go before the request, which has a prompt or
    messages. Of another one nothing is known."""
    if "prompt" in request:
        if content.get("prompt") is None:
            raise WrongKindError(
                f"prefix {name!r} has messages; use it on a route of chats, or name a prompt"
            )
        if not isinstance(request["prompt"], str):
            raise WrongKindError(f"prefix {name!r} goes before one prompt of text")
    elif "messages" in request or "input" in request:
        if "messages" not in content:
            raise WrongKindError(
                f"prefix {name!r} has a prompt; use it on the route of completions, or name "
                "messages"
            )
    else:
        return
    own, asked = content.get(LORA), request.get(LORA)  # its rows are of no use to another adapter
    if (own or None) != (asked or None):
        belongs = f"to adapter {own!r}" if own else "to the model without an adapter"
        raise WrongKindError(
            f"prefix {name!r} belongs {belongs}; give the request the same lora_name, or "
            "add the prefix with this one under another name"
        )


class NamedModel:
    """Behaves like `model` when it is asked with the named text before the prompt, or the named
    messages before the messages. That is what xinference's routes have made of the request."""

    def __init__(self, model: Any, name: str, content: Mapping[str, Any]) -> None:
        self._model = model
        self._name = name
        self._content = content
        self._prepared = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("generate_config")
        check(self._name, self._content, {"prompt": prompt, **_adapter(config)})
        prompt = self._content["prompt"] + prompt
        return await self._model.generate(prompt, *args, **kwargs)

    async def chat(self, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("generate_config")
        return await self._model.chat(self._before(messages, config), *args, **kwargs)

    async def prepare_anthropic_request(self, messages: list[Any], config: Any) -> Any:
        """xinference prepares Anthropic's messages before it calls `chat` with the result."""
        messages = self._before(messages, config)
        self._prepared = True
        return await self._model.prepare_anthropic_request(messages, config)

    def _before(self, messages: list[Any], config: Any) -> list[Any]:
        if self._prepared:
            return messages
        check(self._name, self._content, {"messages": messages, **_adapter(config)})
        if (tools := self._content.get("tools")) and isinstance(config, dict):
            config["tools"] = [*tools, *(config.get("tools") or [])]
        return [*self._content["messages"], *messages]


def _adapter(config: Any) -> dict[str, Any]:
    return {LORA: config.get(LORA)} if isinstance(config, dict) else {}

"""A model's reference for one request that begins with a named prefix, or asks to keep its prompt.

`ModelProxy` behaves like the reference that it wraps, which may be routed. Each request passes two
optional steps, in this order: the prefix goes before the prompt, then the request's id says what
the replica keeps. The answer's `usage` reports what is kept from now on:
`cache_creation_input_tokens` counts the kept tokens that the request did not find in a cache.
xinference makes Anthropic's `usage` of it, and of `cached_tokens`.
"""

import json
import math
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from xinference_xavier.protocol.prefixes import LORA, Keeping, with_keeping
from xinference_xavier.runtime.aio import in_thread
from xinference_xavier.serving import seam


class WrongKindError(ValueError):
    """A prompt cannot begin with messages, nor a chat with a prompt, nor a request to one adapter
    with what belongs to another."""


class NamedPrefix(NamedTuple):
    """The content that clients stored under a name: a prompt, or messages and perhaps tools."""

    name: str
    content: Mapping[str, Any]

    def check(self, request: Mapping[str, Any]) -> None:
        """Raises WrongKindError unless the prefix can go before the request, which has a prompt or
        messages. A request with neither passes."""
        if "prompt" in request:
            if self.content.get("prompt") is None:
                raise WrongKindError(
                    f"prefix {self.name!r} has messages; use it on a route of chats, or name a "
                    "prompt"
                )
            if not isinstance(request["prompt"], str):
                raise WrongKindError(f"prefix {self.name!r} goes before one prompt of text")
        elif "messages" in request or "input" in request:
            if "messages" not in self.content:
                raise WrongKindError(
                    f"prefix {self.name!r} has a prompt; use it on the route of completions, or "
                    "name messages"
                )
        else:
            return
        own, asked = self.content.get(LORA), request.get(LORA)  # rows fit one adapter only
        if (own or None) != (asked or None):
            belongs = f"to adapter {own!r}" if own else "to the model without an adapter"
            raise WrongKindError(
                f"prefix {self.name!r} belongs {belongs}; give the request the same lora_name, or "
                "add the prefix with this one under another name"
            )

    def before_messages(self, messages: list[Any], config: Any) -> list[Any]:
        """Also adds the prefix's tools to `config`."""
        if (tools := self.content.get("tools")) and isinstance(config, dict):
            config["tools"] = [*tools, *(config.get("tools") or [])]
        return [*self.content["messages"], *messages]


class ModelProxy:
    """Wraps `model` for one request, to which `prefix` fits (`NamedPrefix.check`).

    With `prompt_s`, the replica that computes the request keeps the whole prompt for so many
    seconds; without, it keeps what Anthropic's `cache_control` marks, as xinference has read it.
    """

    def __init__(
        self, model: Any, prefix: NamedPrefix | None = None, prompt_s: float = 0.0
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._keeping = Keeping(prompt_s, 1.0) if prompt_s else None
        self._name: str | None = None  # of the request, as xinference knows it
        self._prepared = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self._prefix is not None:
            prompt = self._prefix.content["prompt"] + prompt
        return self._counted(await self._model.generate(prompt, *args, **self._named(kwargs)))

    async def chat(self, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        messages = self._with_prefix(messages, _config(args, kwargs))
        return self._counted(await self._model.chat(messages, *args, **self._named(kwargs)))

    async def prepare_anthropic_request(self, messages: list[Any], config: Any) -> Any:
        """xinference prepares Anthropic's messages before it calls `chat` with the result."""
        messages = self._with_prefix(messages, config)
        self._prepared = True
        marked = seam.anthropic_marks(config)
        if isinstance(marked, dict) and marked.get("messages"):
            tools = config.get("tools")
            part = [marked["messages"], marked.get("tools", tools)]
            share = await in_thread(_share, part, [messages, tools])
            self._keeping = Keeping(float(marked["ttl"]), share)
        return await self._model.prepare_anthropic_request(messages, config)

    async def abort_request(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == self._name and self._keeping is not None:
            name = with_keeping(name, self._keeping)
        return await self._model.abort_request(name, *args, **kwargs)

    def _with_prefix(self, messages: list[Any], config: Any) -> list[Any]:
        if self._prefix is None or self._prepared:
            return messages
        return self._prefix.before_messages(messages, config)

    def _named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The replica learns from the request's id what to keep."""
        if self._keeping is None:
            return kwargs
        self._name = str(kwargs.get("request_id") or uuid.uuid4().hex)
        return {**kwargs, "request_id": with_keeping(self._name, self._keeping)}

    def _counted(self, answer: Any) -> Any:
        if self._keeping is None:
            return answer
        if isinstance(answer, (bytes, str)):
            return counted(answer, self._keeping.share)
        return _Counted(answer, self._keeping.share) if hasattr(answer, "aclose") else answer


def _config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("generate_config")


def _share(part: object, whole: object) -> float:
    """The share of a prompt's tokens that is in `part`, estimated by characters."""
    return min(1.0, _length(part) / max(1, _length(whole)))


def _length(value: object) -> int:
    """Characters of all texts in it."""
    length, rest = 0, [value]
    while rest:
        match rest.pop():
            case str() as text:
                length += len(text)
            case dict() as items:
                rest += items.values()
            case list() as items:
                rest += items
    return length


# -- usage -----------------------------------------------------------------------------------------


def counted(answer: bytes | str, share: float) -> bytes | str:
    """Adds the kept tokens, a `share` of the prompt's, to the `usage` of an answer in JSON or of a
    stream's event. Returns the same type."""
    text = answer if isinstance(answer, str) else answer.decode()
    if '"prompt_tokens"' not in text:
        return answer
    # An event's lines, of which one has all the data.
    lines = text.split("\n")
    text = "\n".join(_line(line, share) if '"prompt_tokens"' in line else line for line in lines)
    return text if isinstance(answer, str) else text.encode()


class _Counted(AsyncIterator[Any]):
    """A class, because it owns `stream` before its first item is asked for: to close a generator
    that has not begun has no effect."""

    def __init__(self, stream: Any, share: float) -> None:
        self._stream = stream
        self._share = share

    async def __anext__(self) -> Any:
        item = await anext(self._stream)
        return counted(item, self._share) if isinstance(item, (bytes, str)) else item

    async def aclose(self) -> None:
        await self._stream.aclose()


def _line(line: str, share: float) -> str:
    start = line.find("{")
    if start < 0:
        return line
    try:
        answer, end = json.JSONDecoder().raw_decode(line[start:])
    except ValueError:  # not ours
        return line
    usage = answer.get("usage")
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
        return line
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    tokens = math.ceil(share * usage["prompt_tokens"])
    usage["cache_creation_input_tokens"] = max(0, tokens - cached)
    return line[:start] + json.dumps(answer) + line[start + end :]

"""A model's reference for a request that asks to keep its prompt, or the beginning of it."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from xinference_xavier.protocol.prefixes import Keeping, with_keeping
from xinference_xavier.serving.prefixes.usage import counted, counted_stream


class KeptModel:
    """Behaves like `model`. The replica that computes the request keeps the whole prompt for
    `prompt_s` seconds, if that is not 0, or whatever Anthropic's `cache_control` marks, as
    xinference has read it. `usage` says how much of it was in no cache."""

    def __init__(self, model: Any, prompt_s: float) -> None:
        self._model = model
        self._keeping = Keeping(prompt_s, 1.0) if prompt_s else None
        self._name: str | None = None  # of the request, as xinference knows it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await self._model.generate(prompt, *args, **self._named(kwargs))
        return await self._counted(answer)

    async def chat(self, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        return await self._counted(await self._model.chat(messages, *args, **self._named(kwargs)))

    async def abort_request(self, name: str, *args: Any) -> Any:
        if name == self._name and self._keeping is not None:
            name = with_keeping(name, self._keeping)
        return await self._model.abort_request(name, *args)

    async def prepare_anthropic_request(self, messages: list[Any], config: Any) -> Any:
        marked = config.get("_anthropic_cache_control") if isinstance(config, dict) else None
        if isinstance(marked, dict) and marked.get("messages"):
            tools = config.get("tools")
            part = [marked["messages"], marked.get("tools", tools)]
            share = await asyncio.to_thread(_share, part, [messages, tools])
            self._keeping = Keeping(float(marked["ttl"]), share)
        return await self._model.prepare_anthropic_request(messages, config)

    def _named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The replica knows by the request's id what to keep."""
        if self._keeping is None:
            return kwargs
        self._name = str(kwargs.get("request_id") or uuid.uuid4().hex)
        return {**kwargs, "request_id": with_keeping(self._name, self._keeping)}

    async def _counted(self, answer: Any) -> Any:
        if self._keeping is None:
            return answer
        if isinstance(answer, (bytes, str)):
            return await counted(answer, self._share)
        return counted_stream(answer, self._share) if hasattr(answer, "aclose") else answer

    async def _share(self) -> float | None:
        return None if self._keeping is None else self._keeping.share


def _share(part: object, whole: object) -> float:
    """A prompt has about as large a part of its tokens in `part` as of its text."""
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

"""A model's reference for a request that asks to keep its prompt, or the beginning of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from xinference_xavier.frontend.prefixes.prefix import LORA
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.tasks import retrieve, spawn
from xinference_xavier.serving.prefixes.usage import ALL, counted, counted_stream

Keep = Callable[[Mapping[str, Any], float], None]
"""Keeps a content for so many seconds after its last use."""
Measure = Callable[[Mapping[str, Any]], Awaitable[int]]
"""The tokens of a content."""
_PATIENCE = 1.0
"""Seconds for which an answer waits for the tokens of what is kept."""


class KeptModel:
    """Behaves like `model`. Keeps the whole prompt for `prompt_s` seconds, if that is not 0, and
    whatever Anthropic's `cache_control` marks, as xinference has read it. `usage` says how much of
    it was in no cache."""

    def __init__(self, model: Any, keep: Keep, measure: Measure, prompt_s: float) -> None:
        self._model = model
        self._keep = keep
        self._measure = measure
        self._prompt_s = prompt_s
        self._keeps_all = prompt_s > 0
        self._marked: asyncio.Future[int] | None = None  # tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self._prompt_s and isinstance(prompt, str):
            config = args[0] if args else kwargs.get("generate_config")
            self._keep({"prompt": prompt, **_adapter(config)}, self._prompt_s)
        return await self._counted(await self._model.generate(prompt, *args, **kwargs))

    async def chat(self, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        if self._prompt_s:
            config = args[0] if args else kwargs.get("generate_config")
            self._keep_messages(messages, _tools(config), config, self._prompt_s)
        return await self._counted(await self._model.chat(messages, *args, **kwargs))

    async def prepare_anthropic_request(self, messages: list[Any], config: Any) -> Any:
        marked = config.get("_anthropic_cache_control") if isinstance(config, dict) else None
        if isinstance(marked, dict) and marked.get("messages"):
            tools = marked.get("tools", _tools(config))
            content = self._keep_messages(marked["messages"], tools, config, float(marked["ttl"]))
            if len(marked["messages"]) >= len(messages):
                self._keeps_all = True
            else:
                self._marked = spawn(self._measure(content))
                self._marked.add_done_callback(retrieve)
        return await self._model.prepare_anthropic_request(messages, config)

    def _keep_messages(
        self, messages: list[Any], tools: Any, config: Any, seconds: float
    ) -> Mapping[str, Any]:
        content = {"messages": messages, **({"tools": tools} if tools else {}), **_adapter(config)}
        self._keep(content, seconds)
        return content

    async def _counted(self, answer: Any) -> Any:
        if not self._keeps_all and self._marked is None:
            return answer
        if isinstance(answer, (bytes, str)):
            return await counted(answer, self._kept)
        return counted_stream(answer, self._kept) if hasattr(answer, "aclose") else answer

    async def _kept(self) -> float | None:
        if self._keeps_all or self._marked is None:
            return ALL
        try:
            return await within(_PATIENCE, asyncio.shield(self._marked))
        except Exception:  # the answer counts, with this figure or without it
            return None


def _tools(config: Any) -> Any:
    return config.get("tools") if isinstance(config, dict) else None


def _adapter(config: Any) -> dict[str, Any]:
    """Rows belong to an adapter."""
    name = config.get(LORA) if isinstance(config, dict) else None
    return {LORA: name} if name else {}

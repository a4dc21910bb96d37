"""A model's reference for a request that asks to keep its prompt, or the beginning of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Keep = Callable[[Mapping[str, Any], float], None]
"""Keeps a content for so many seconds after its last use."""


class KeptModel:
    """Behaves like `model`. Keeps the whole prompt for `prompt_s` seconds, if that is not 0, and
    whatever Anthropic's `cache_control` marks, as xinference has read it."""

    def __init__(self, model: Any, keep: Keep, prompt_s: float) -> None:
        self._model = model
        self._keep = keep
        self._prompt_s = prompt_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self._prompt_s and isinstance(prompt, str):
            self._keep({"prompt": prompt}, self._prompt_s)
        return await self._model.generate(prompt, *args, **kwargs)

    async def chat(self, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        if self._prompt_s:
            config = args[0] if args else kwargs.get("generate_config")
            self._keep_messages(messages, _tools(config), self._prompt_s)
        return await self._model.chat(messages, *args, **kwargs)

    async def prepare_anthropic_request(self, messages: list[Any], config: Any) -> Any:
        marked = config.get("_anthropic_cache_control") if isinstance(config, dict) else None
        if isinstance(marked, dict) and marked.get("messages"):
            tools = marked.get("tools", _tools(config))
            self._keep_messages(marked["messages"], tools, float(marked["ttl"]))
        return await self._model.prepare_anthropic_request(messages, config)

    def _keep_messages(self, messages: list[Any], tools: Any, seconds: float) -> None:
        content = {"messages": messages}
        self._keep({**content, "tools": tools} if tools else content, seconds)


def _tools(config: Any) -> Any:
    return config.get("tools") if isinstance(config, dict) else None

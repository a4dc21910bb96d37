"""`usage` of a request that asks to keep its prompt: how many tokens are kept from now on.

`cache_creation_input_tokens` has those that the request did not find in a cache. xinference makes
Anthropic's `usage` of it, and of `cached_tokens`.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

Kept = Callable[[], Awaitable[float | None]]
"""The share of the prompt that is kept; None if it is not known."""
_Text = TypeVar("_Text", bytes, str)


async def counted(answer: _Text, kept: Kept) -> _Text:
    """An answer in JSON, or an event of a stream."""
    text = answer if isinstance(answer, str) else answer.decode()
    if '"prompt_tokens"' not in text:
        return answer
    share = await kept()
    if share is None:
        return answer
    # An event's lines, of which one has all the data.
    lines = text.split("\n")
    text = "\n".join(_line(line, share) if '"prompt_tokens"' in line else line for line in lines)
    return text if isinstance(answer, str) else text.encode()


def counted_stream(stream: Any, kept: Kept) -> AsyncIterator[Any]:
    """The same of each item."""
    return _Counted(stream, kept)


class _Counted(AsyncIterator[Any]):
    """A class, because it owns `stream` before its first item is asked for: to close a generator
    that has not begun has no effect."""

    def __init__(self, stream: Any, kept: Kept) -> None:
        self._stream = stream
        self._kept = kept

    async def __anext__(self) -> Any:
        item = await anext(self._stream)
        return await counted(item, self._kept) if isinstance(item, (bytes, str)) else item

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
    return line[:start] + json.dumps(answer, ensure_ascii=False) + line[start + end :]

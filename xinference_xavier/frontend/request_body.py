"""A request's body on its way through: passed on as it comes, and kept as long as it is short, so
that it can be sent a second time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from xinference_xavier.frontend.asked import MAX_BODY

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class RequestBody:
    """Of one request. `receive` is ASGI's."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: list[bytes] = []
        self._size = 0
        self._passed_on = False
        self._abandoned = False
        self._received = asyncio.Event()

    @property
    def again(self) -> bool:
        """Whether `stream` can begin anew."""
        return not self._abandoned and (not self._passed_on or self._size <= MAX_BODY)

    async def read(self) -> bytes:
        """All of it; empty if it is longer than `MAX_BODY`. Raises ClientGoneError."""
        while self._size <= MAX_BODY and not self._received.is_set():
            self._kept.append(await self._next())
        return b"".join(self._kept) if self._size <= MAX_BODY else b""

    async def stream(self) -> AsyncIterator[bytes]:
        """All of it, from the beginning. Raises ClientGoneError."""
        self._passed_on = True
        for chunk in [*self._kept]:
            yield chunk
        while not self._received.is_set():
            chunk = await self._next()
            self._kept.append(chunk)
            if not self.again:
                self._kept.clear()
            yield chunk
        if not self.again:
            self._kept.clear()

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        if not message.get("more_body", False):
            self._received.set()
        chunk: bytes = message.get("body", b"")
        self._size += len(chunk)
        return chunk

    def abandon(self) -> None:
        """Nobody needs the rest of it, if there is any."""
        self._abandoned = self._abandoned or not self._received.is_set()
        self._received.set()

    async def client_gone(self) -> None:
        """Return when the client has gone. Until the whole body is here, its readers notice it."""
        await self._received.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

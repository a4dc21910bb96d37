"""Keeps what a request asks at hand until a replica is chosen for it, and ends its route.

The body is recorded as xinference reads it. Nothing is read, changed or held back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from xinference_xavier.frontend.asked import MAX_BODY, ROUTES, Keep, read_keep, read_question
from xinference_xavier.frontend.model_router import ModelRouter, Route
from xinference_xavier.frontend.request_body import ClientGoneError, Message, Receive

Send = Callable[[Message], Awaitable[None]]

_asked: ContextVar[Asked | None] = ContextVar("xavier_asked", default=None)


def current() -> Asked | None:
    """What the request asks that runs here; None for other routes."""
    return _asked.get()


class Asked:
    """One request."""

    def __init__(self, scope: Message, receive: Receive) -> None:
        self.route: Route | None = None
        self._scope = scope
        self._receive = receive
        self._body: list[bytes] = []
        self._size = 0
        self._router: ModelRouter | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and self._size <= MAX_BODY:
            self._body.append(message.get("body", b""))
            self._size += len(self._body[-1])
        return message

    async def keep(self) -> Keep:
        """What the request says about keeping its prefix."""
        return await read_keep(b"".join(self._body), self._header(b"x-xavier-prefix"))

    async def route_by(
        self, router: ModelRouter, before: Mapping[str, Any] | None = None
    ) -> Route | None:
        """See `ModelRouter.route`. `before` is the content of the prefix that the request names.
        Raises ClientGoneError if the client goes while it waits."""
        body = b"".join(self._body)
        self._body.clear()
        question = await read_question(body, self._header(b"x-session-id"), before)
        # A client that names its request may abort it by this name.
        whole = bool(question.request_id)
        routing = asyncio.ensure_future(router.route(question.text, question.session, whole=whole))
        leaving = asyncio.ensure_future(self._leaves())
        try:
            await asyncio.wait({routing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not routing.done():
                raise ClientGoneError
        finally:
            leaving.cancel()
            routing.cancel()
            await asyncio.wait({routing})
        self.route, self._router = routing.result(), router
        return self.route

    def _header(self, name: bytes) -> str | None:
        headers: list[tuple[bytes, bytes]] = self._scope["headers"]
        found = next((value for key, value in headers if key == name), None)
        if found is None:
            return None
        try:
            return found.decode()
        except UnicodeDecodeError:
            return found.decode("latin-1")

    async def _leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def end(self) -> None:
        if self.route is not None and self._router is not None:
            self._router.end(self.route)
            self.route = None


class RoutingMiddleware:
    """ASGI middleware for the text routes."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"].removeprefix(scope.get("root_path", "")) not in ROUTES
        ):
            await self._app(scope, receive, send)
            return
        asked = Asked(scope, receive)
        token = _asked.set(asked)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and asked.route is not None:
                message["headers"] = [*message.get("headers", ()), *asked.route.headers()]
            await send(message)

        try:
            await self._app(scope, asked.receive, answer)
        finally:
            _asked.reset(token)
            asked.end()

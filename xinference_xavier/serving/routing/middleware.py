"""Keeps a request of a text route at hand until a replica is chosen for it, and ends its route.

The request is xinference's own, with the body as xinference has read it. Nothing is read twice,
changed or held back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.routing import APIRoute

from xinference_xavier.frontend.asked import SALT, Keep, parsed_question, read_keep
from xinference_xavier.frontend.model_router import ModelRouter, Route
from xinference_xavier.frontend.request_body import ClientGoneError, Message, Receive
from xinference_xavier.serving.answers import tenant_of

Send = Callable[[Message], Awaitable[None]]

MESSAGE = "create_message"
TEXT_ENDPOINTS = {"create_chat_completion", "create_completion", MESSAGE, "create_response"}
"""xinference's functions that answer with a text, at whatever paths."""

_asked: ContextVar[Asked | None] = ContextVar("xavier_asked", default=None)


def current() -> Asked | None:
    """What the request asks that runs here; None for other routes."""
    asked = _asked.get()
    return None if asked is None or asked.request is None else asked


async def _remember(request: Request) -> None:
    """A dependency, which gets the object that the endpoint gets."""
    asked = _asked.get()
    if asked is not None:
        asked.request = request


def remember_texts(router: APIRouter) -> set[str]:
    """Lets the text routes of `router` remember their requests, from when an application includes
    it. Returns the names of their endpoints."""
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    texts = [route for route in routes if _name(route) in TEXT_ENDPOINTS]
    for route in texts:
        route.dependencies.append(Depends(_remember))  # the last: after authentication
    return {*map(_name, texts)}


def _name(route: APIRoute) -> str:
    return getattr(route.endpoint, "__name__", "")


class Asked:
    """One request."""

    def __init__(self, scope: Message, receive: Receive) -> None:
        self.route: Route | None = None
        self.request: Request | None = None
        """None unless it is one of a text route."""
        self._scope = scope
        self._receive = receive
        self._body: Mapping[str, Any] | None = None
        self._router: ModelRouter | None = None

    async def keep(self) -> Keep:
        """What the request says about keeping its prefix. Raises HTTPException."""
        body = await self._read()
        assert self.request is not None
        marks = _name(self.request.scope["route"]) == MESSAGE
        try:
            return read_keep(body, self._header(b"x-xavier-prefix"), marks)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error

    async def _read(self) -> Mapping[str, Any]:
        """The body, as xinference has read it when it asks for a model, with the salt that counts.
        Raises HTTPException."""
        if self._body is None:
            assert self.request is not None
            body = await self.request.json()
            body = body if isinstance(body, dict) else {}
            self._body = {**body, SALT: tenant_of(self.request, body.get(SALT))}
        return self._body

    async def route_by(
        self, router: ModelRouter, before: Mapping[str, Any] | None = None
    ) -> Route | None:
        """See `ModelRouter.route`. `before` is the content of the prefix that the request names.
        Raises ClientGoneError if the client goes while it waits."""
        assert self.request is not None
        size, session = len(await self.request.body()), self._header(b"x-session-id")
        question = await parsed_question(await self._read(), size, session, before)
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
        found = next((value for key, value in self._scope["headers"] if key == name), None)
        return None if found is None else found.decode("latin-1")

    async def _leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def end(self) -> None:
        if self.route is not None and self._router is not None:
            self._router.end(self.route)
            self.route = None


class RoutingMiddleware:
    """ASGI middleware."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Asked(scope, receive)
        token = _asked.set(asked)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and asked.route is not None:
                message["headers"] = [*message.get("headers", ()), *asked.route.headers()]
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            _asked.reset(token)
            asked.end()

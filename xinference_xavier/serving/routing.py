"""Puts routing between xinference's text routes and the replicas of a model.

xinference 4.1 has no seam for it. Its routes find a model by the module's function `require_model`,
which is wrapped.

A middleware keeps the request of a text route at hand until a replica is chosen for it, and ends
its route. The request is xinference's own, with the body as xinference has read it. Nothing is read
twice or changed, and nothing is held back but the beginning of a routed answer, until its first
byte.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Send

from xinference_xavier.errors import ReplicaNotServingError, SupervisorError
from xinference_xavier.frontend.model_router import (
    AT_LIMIT,
    Failure,
    ModelRouter,
    QueueFullError,
)
from xinference_xavier.frontend.question import SALT, Keep, read_keep, read_question
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.routing.route import Route
from xinference_xavier.runtime.aio import within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.serving import seam
from xinference_xavier.serving.model_proxy import ModelProxy, NamedPrefix, WrongKindError
from xinference_xavier.serving.rest import tenant_of
from xinference_xavier.serving.routed_model import AtLimitError, Connect, RoutedModel


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


_asked: ContextVar[Asked | None] = ContextVar("xavier_asked", default=None)


def current() -> Asked | None:
    """The request that runs here; None outside of one."""
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
    texts = [route for route in routes if _name(route) in seam.TEXT_ENDPOINTS]
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
        self.chat: Mapping[str, Any] | None = None
        """The chat that xinference makes of a request in another form."""
        self._scope = scope
        self._receive = receive
        self._body: Mapping[str, Any] | None = None
        self._router: ModelRouter | None = None

    async def keep(self) -> Keep:
        """What the request says about keeping its prefix. Raises HTTPException."""
        body = await self.body()
        assert self.request is not None
        marks = _name(self.request.scope["route"]) == seam.MESSAGE
        try:
            return read_keep(body, self._header(b"x-xavier-prefix"), marks)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error

    async def body(self) -> Mapping[str, Any]:
        """The fields that xinference has read when it asks for a model, with the salt that counts.
        Raises HTTPException."""
        if self._body is None:
            assert self.request is not None
            body = await self.request.json()
            body = dict(body) if isinstance(body, dict) else {}
            completes = _name(self.request.scope["route"]) == seam.COMPLETION
            for ignored in ("messages", "input") if completes else ("prompt",):
                body.pop(ignored, None)
            self._body = {**body, SALT: tenant_of(self.request, body.get(SALT))}
        return self._body

    async def route_by(
        self, router: ModelRouter, before: Mapping[str, Any] | None = None
    ) -> Route | None:
        """The request's route, sent to a replica; None if requests go round-robin. `before` is the
        content of the prefix that the request names. Raises QueueFullError, and ClientGoneError if
        the client goes while the request waits."""
        assert self.request is not None
        size, body = len(await self.request.body()), await self.body()
        session = self._header(b"x-session-id") or self._header(b"x-claude-code-session-id")
        question = await read_question(body, size, session, before, self.chat)
        self._router = router
        self.route = router.open(
            question.text,
            question.session,
            limit=question.max_tokens,
            # A client that names its request may abort it by this name.
            whole=bool(question.request_id),
        )
        if self.route is None:
            return None
        placing = asyncio.ensure_future(router.place(self.route))
        leaving = asyncio.ensure_future(self._leaves())
        try:
            await asyncio.wait({placing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not placing.done():
                raise ClientGoneError
        finally:
            leaving.cancel()
            placing.cancel()
            await asyncio.wait({placing})
        return self.route if placing.result() else None

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
    """ASGI middleware."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Asked(scope, receive)
        token = _asked.set(asked)

        answer = Answer(asked, send)
        try:
            await self._app(scope, receive, answer.pass_on)
            await answer.end(scope, receive)
        finally:
            _asked.reset(token)
            asked.end()


class Answer:
    """The answer to a request. A routed one begins with its first byte: xinference's streams begin
    before a replica has accepted the request, and if none does, the status can still say so."""

    def __init__(self, asked: Asked, send: Send) -> None:
        self._asked = asked
        self._send = send
        self._held: tuple[Message, Route] | None = None  # the beginning, held back
        self._retry_after = 0  # seconds, if the answer is a refusal instead

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._asked.route is not None:
            self._held = message, self._asked.route
            return
        if self._held is not None:
            (start, route), self._held = self._held, None
            if route.retry_after and start["status"] != HTTPStatus.TOO_MANY_REQUESTS:
                self._retry_after = route.retry_after
            else:
                headers = start.get("headers", ())
                given = {name.lower() for name, _ in headers}
                own = (header for header in route.headers() if header[0] not in given)
                start["headers"] = [*headers, *own]
                await self._send(start)
        if not self._retry_after:
            await self._send(message)

    async def end(self, scope: Message, receive: Receive) -> None:
        """The application has nothing more to send."""
        if self._held is not None:  # the client went before the first byte
            await self.pass_on({"type": "http.response.body", "body": b""})
        if self._retry_after:
            headers = {"Retry-After": str(self._retry_after)}
            refusal = JSONResponse({"detail": AT_LIMIT}, HTTPStatus.TOO_MANY_REQUESTS, headers)
            await refusal(scope, receive, self._send)


logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)

_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody sees it
Require = Callable[..., Awaitable[Any]]
ContentOf = Callable[[str, str, str], Awaitable[Mapping[str, Any]]]
"""Returns what a request begins with, by model, tenant and name. Raises HTTPException."""


def add_routing(context: Any, routers: Routers, content_of: ContentOf) -> None:
    """`context` is xinference's APIExtensionContext."""
    missing = seam.TEXT_ENDPOINTS - remember_texts(context.router)
    if missing:
        logger.warning(
            "requests go to replicas in turn where this xinference has no: %s",
            ", ".join(sorted(missing)),
        )
    seam.wrap_require_model(lambda original: routing_require(original, routers, content_of))
    seam.note_chats(_note_chat)
    seam.add_middleware(context.app, RoutingMiddleware)


def _note_chat(chat: Mapping[str, Any]) -> None:
    if (asked := current()) is not None:
        asked.chat = chat


def routing_require(original: Require, routers: Routers, content_of: ContentOf) -> Require:
    @functools.wraps(original)
    async def require_model(
        get_supervisor_ref: Any, model_uid: str, *args: Any, **kwargs: Any
    ) -> Any:
        asked = current()
        if asked is None:
            return await original(get_supervisor_ref, model_uid, *args, **kwargs)
        keep, prefix = await asked.keep(), None
        if keep.name:
            content = await content_of(model_uid, keep.tenant, keep.name)
            prefix = NamedPrefix(keep.name, content)
            try:
                prefix.check(await asked.body())
            except WrongKindError as error:  # xinference makes a 500 of what its model raises
                raise HTTPException(400, str(error)) from error

        async def connect(replica: str) -> Any:
            return await _model_of(get_supervisor_ref, replica)

        router = routers.get(model_uid)
        model: Any = None
        if router is not None:
            before = None if prefix is None else prefix.content
            model = await _routed(asked, router, connect, before)
        model = model or await original(get_supervisor_ref, model_uid, *args, **kwargs)
        keeps = router is not None and (keep.marks or keep.prompt_s)
        return ModelProxy(model, prefix, keep.prompt_s) if prefix or keeps else model

    return require_model


async def _model_of(get_supervisor_ref: Any, replica: str) -> Any:
    """A reference to the model actor of a replica. Raises ReplicaNotServingError; SupervisorError
    says nothing about the replica."""

    async def find() -> Any:
        supervisor = await get_supervisor_ref()
        return await supervisor.get_model(replica, xavier_replica=True)

    try:
        model = await within(CALL_DEADLINE, find())
    except ReplicaNotServingError:
        raise
    except Exception as error:
        raise SupervisorError(
            f"xinference's supervisor does not say where replica {replica} is ({error!r})"
        ) from error
    return seam.correlated(model)


async def _routed(
    asked: Asked, router: ModelRouter, connect: Connect, before: Mapping[str, Any] | None
) -> RoutedModel | None:
    """The routed model; None if requests go round-robin."""
    try:
        route = await asked.route_by(router, before)
        while route is not None:
            try:
                return RoutedModel(router, route, await connect(route.replica), connect)
            except ReplicaNotServingError as error:
                logger.warning("request goes to another replica: error=%r", error)
                if not await router.move(route, Failure.NOT_SERVING):
                    break
    except QueueFullError as error:
        raise AtLimitError(error.retry_after) from error
    except ClientGoneError as error:
        asked.end()
        raise HTTPException(_CLIENT_CLOSED_REQUEST) from error
    except SupervisorError as error:
        _log.warn("supervisor", "requests go to the replicas in turn: %s", error)
    except Exception as error:  # our own: it costs the choice, not the request
        router.counts.failures += 1
        _log.warn("choice", "requests go to the replicas in turn: %r", error, exc_info=True)
    asked.end()
    return None

"""An OpenAI-compatible reverse proxy in front of the replicas of one model.

Requests of the text routes go where the router sends them, all others to the server with the
fewest. Threading: one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as Page
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from xinference_xavier.frontend import vllm_ids
from xinference_xavier.frontend.asked import ROUTES, read_question
from xinference_xavier.frontend.model_router import ModelRouter, QueueFullError, Route
from xinference_xavier.frontend.request_body import ClientGoneError, RequestBody
from xinference_xavier.frontend.upstreams import (
    Headers,
    NotHttpError,
    Upstream,
    UpstreamError,
    Upstreams,
    read,
)
from xinference_xavier.runtime.tasks import retrieve
from xinference_xavier.stats.routing import RoutingStats

logger = logging.getLogger(__name__)

FindRouter = Callable[[], ModelRouter | None]
"""Returns the model's router; None while its tracker is not known."""
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade".split()
)
_OWN = frozenset({b"host", b"expect"})
_FULL = (429, 503)
_REPEATED = {
    *ROUTES,
    *("/v1/embeddings", "/tokenize", "/detokenize", "/pooling", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
}
"""Routes whose requests another server may get, too, after one that had them broke. Others may
change a server, such as `/v1/load_lora_adapter`."""
_HEADER_VALUE = re.compile(r"[\x21-\x7e]{1,1000}")
IN_TURN = "in turn"


class Answer(NamedTuple):
    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]


class NoReplicaError(Exception):
    """No server answers the request."""


def make_app(upstreams: Upstreams, find_router: FindRouter) -> Starlette:
    """The application. It closes `upstreams` in the end."""

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _forward(Exchange(scope, RequestBody(receive), upstreams, find_router), send)
        else:
            await WebSocketClose()(scope, receive, send)

    async def health(_request: Request) -> Response:
        return Response(status_code=200 if await upstreams.healthy() else 503)

    async def xavier(_request: Request) -> Response:
        router = find_router()
        return JSONResponse(asdict(RoutingStats()) if router is None else router.report())

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        find_router()  # the first request need not be the one that looks for the tracker
        yield
        await upstreams.aclose()

    pages = [Page("/health", health), Page("/xavier", xavier), Mount("", forward)]
    return Starlette(routes=pages, lifespan=lifespan)


async def _forward(exchange: Exchange, send: Send) -> None:
    """Until the answer is complete or the client has gone."""
    serving = asyncio.ensure_future(exchange.run(send))
    leaving = asyncio.ensure_future(exchange.body.client_gone())
    for task in (serving, leaving):
        task.add_done_callback(retrieve)
    try:
        await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    except ClientGoneError:
        pass
    finally:
        leaving.cancel()
        serving.cancel()
        await asyncio.wait({serving, leaving})


class Exchange:
    """One request and its answer."""

    def __init__(
        self, scope: Scope, body: RequestBody, upstreams: Upstreams, find_router: FindRouter
    ) -> None:
        self.body = body
        self._path: str = scope["path"]
        self._method: str = scope["method"]
        self._target = _target(scope)
        self._headers = _passed_on(scope["headers"], _HOP_BY_HOP | _OWN)
        self._has_body = any(
            name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]
        )
        self._upstreams = upstreams
        self._find_router = find_router
        self._router: ModelRouter | None = None
        self._route: Route | None = None
        self._at: Upstream | None = None
        self._response: httpx.Response | None = None
        self._tried: dict[Upstream, str] = {}  # with what happened there
        self._broken = 0

    async def run(self, send: Send) -> None:
        """Raises ClientGoneError if the client goes while its body is read."""
        try:
            await self._pass_on(await self._ask(), send)
        except QueueFullError as error:
            await _refuse(send, 429, error, (b"retry-after", str(error.retry_after).encode()))
        except NoReplicaError as error:
            await _refuse(send, 502, error)
        except NotHttpError as error:
            await _refuse(send, 400, error)
        finally:
            self._end_route()
            await self._leave()

    # -- asking --------------------------------------------------------------------------------

    async def _ask(self) -> Answer:
        """Ask one server after another until one answers."""
        upstream: Upstream | None = await self._first()
        while upstream is not None:
            try:
                answer = await self._unless_lost(self._begin(upstream))
            except UpstreamError as error:
                logger.warning("replica %s does not answer: %s", upstream.name, error)
                self._tried[upstream] = str(error)
                self._upstreams.close(upstream)
                self._broken += error.reached
                again = not error.reached or (self._broken < 2 and self._repeatable)
                upstream = await self._another(full=False) if again else None
            else:
                status = answer.response.status_code
                self._tried[upstream] = f"status {status}"
                following = await self._another(full=True) if status in _FULL else None
                if following is None:
                    return answer
                upstream = following
            await self._leave()
        happened = ", ".join(f"{each.name}: {what}" for each, what in self._tried.items())
        raise NoReplicaError(f"no replica answers ({happened})")

    @property
    def _repeatable(self) -> bool:
        return self._method in ("GET", "HEAD") or self._path in _REPEATED

    async def _first(self) -> Upstream | None:
        if self._method == "POST" and self._path in ROUTES:
            await self._choose()
        return self._routed() or self._upstreams.fewest()

    async def _choose(self) -> None:
        """Let the router choose. Raises QueueFullError."""
        question = await read_question(await self.body.read(), self._header(b"x-session-id"))
        request_id = self._header(vllm_ids.HEADER)
        if request_id is None:
            # Without a header vLLM would take the id in the body.
            in_body = _HEADER_VALUE.fullmatch(question.request_id)
            request_id = in_body[0] if in_body else uuid.uuid4().hex
            self._headers.append((vllm_ids.HEADER, request_id.encode()))
        self._router = self._find_router()
        if self._router is None:
            return
        self._route = await self._router.route(question.text, question.session)
        for name in vllm_ids.engine_ids(self._path, request_id, question.request_id):
            self._named(name)

    def _routed(self) -> Upstream | None:
        return None if self._route is None else self._upstreams.named(self._route.replica)

    def _named(self, name: str) -> None:
        if self._route is not None and self._router is not None:
            self._router.named(self._route, name)

    async def _begin(self, upstream: Upstream) -> Answer:
        """The answer, from its first byte on: until then another server can answer."""
        self._at = upstream
        self._upstreams.begin(upstream)
        content = self.body.stream() if self._has_body else None
        self._response = await upstream.send(self._method, self._target, self._headers, content)
        self.body.abandon()
        rest = read(self._response)
        return Answer(self._response, await anext(rest, b""), rest)

    async def _unless_lost(self, asking: Awaitable[Answer]) -> Answer:
        """Raises UpstreamError once the tracker has lost the replica."""
        task = asyncio.ensure_future(asking)
        task.add_done_callback(retrieve)
        lost = asyncio.Event() if self._route is None else self._route.lost
        losing = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait({task, losing}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise UpstreamError("the tracker has lost it", reached=True)
        finally:
            losing.cancel()
            task.cancel()
            await asyncio.wait({task})

    async def _another(self, full: bool) -> Upstream | None:
        """Where the request goes after a server that failed it or is `full`. Raises
        QueueFullError."""
        if not self.body.again:
            return None
        if self._router is not None and self._route is not None:
            if await self._router.move(self._route, full):
                return self._routed()
            self._end_route()
        return self._upstreams.fewest(but=self._tried)

    async def _leave(self) -> None:
        """The server where the request is."""
        at, self._at = self._at, None
        response, self._response = self._response, None
        if at is not None:
            self._upstreams.end(at)
        if response is not None:
            await response.aclose()

    def _end_route(self) -> None:
        if self._router is not None and self._route is not None:
            self._router.end(self._route)
        self._route = None

    # -- answering -----------------------------------------------------------------------------

    async def _pass_on(self, answer: Answer, send: Send) -> None:
        response, first, rest = answer
        self._answered(response, first)
        headers = [*_passed_on(response.headers.raw, _HOP_BY_HOP), *self._where()]
        start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
        await send(start)
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for chunk in rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except UpstreamError as error:
            # An answer that is not completed is cut off.
            logger.warning("an answer of replica %s broke off: %s", self._name(), error)
            return
        await send({"type": "http.response.body"})

    def _answered(self, response: httpx.Response, first: bytes) -> None:
        if self._router is None or self._route is None:
            return
        for name in vllm_ids.ids_in_answer(self._path, first):
            self._named(name)
        # The first event of a response comes before its prompt is computed.
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        self._router.answered(self._route, streamed=events and self._path != vllm_ids.RESPONSES)

    def _where(self) -> Headers:
        if self._route is not None:
            return self._route.headers()
        return [(b"x-xavier-replica", self._name().encode()), (b"x-xavier-route", IN_TURN.encode())]

    def _name(self) -> str:
        return "" if self._at is None else self._at.name

    def _header(self, name: bytes) -> str | None:
        found = next((value for key, value in self._headers if key.lower() == name), None)
        return None if found is None else found.decode("latin-1")


def _target(scope: Scope) -> str:
    """Path and query, as the client wrote them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    if not path.startswith(b"/"):  # or it would become part of the host
        path = b"/" + path
    return (path + b"?" + query if query else path).decode("latin-1")


def _passed_on(headers: Headers, but: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for word in value.split(b",")
    }
    return [each for each in headers if each[0].lower() not in but | named]


async def _refuse(send: Send, status: int, error: Exception, *headers: tuple[bytes, bytes]) -> None:
    """In the form in which vLLM reports errors."""
    told = {"message": str(error), "type": type(error).__name__, "param": None, "code": status}
    body = json.dumps({"error": told}).encode()
    length = str(len(body)).encode()
    kind = [(b"content-type", b"application/json"), (b"content-length", length)]
    start = {"type": "http.response.start", "status": status, "headers": [*kind, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})

"""The router learns what a request asks as xinference has read it. Nothing of it is changed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from tests.frontend.cluster import Cluster
from xinference_xavier.frontend.question import MAX_BODY
from xinference_xavier.routing.texts import Text
from xinference_xavier.serving.routing import (
    Asked,
    ClientGoneError,
    RoutingMiddleware,
    _asked,
    current,
)

SCOPE = {"type": "http", "path": "/v1/completions", "headers": []}


def receiver(*messages: dict[str, Any]) -> Any:
    left = [*messages]

    async def receive() -> Any:
        return left.pop(0) if left else {"type": "http.disconnect"}

    return receive


def body(text: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": text, "more_body": more}


class Told:
    """A router that sends nothing anywhere."""

    async def route(self, text: Text, session: str, *, whole: bool) -> None:
        self.length, self.session, self.whole = text.length, session, whole


async def told_with(*messages: dict[str, Any], **scope: Any) -> Told:
    """What a router is told of a request. Its client stays."""
    told = Told()
    asked = await asked_with(*messages, **scope)
    assert await asked.route_by(told) is None  # type: ignore[arg-type]
    return told


async def asked_with(*messages: dict[str, Any], **scope: Any) -> Asked:
    whole = {**SCOPE, **scope}
    receive = receiver(*messages)
    asked = Asked(whole, receive)
    asked.request = Request(whole, receive)
    await asked.request.body()
    return asked


async def test_the_body_is_put_together_from_its_parts() -> None:
    whole = json.dumps({"prompt": "x" * 3000, "prompt_cache_key": "chat"}).encode()
    told = await told_with(body(whole[:1000], more=True), body(whole[1000:]))
    assert (told.length, told.session) == (3000, "chat")


async def test_a_long_body_is_read_aside() -> None:
    whole = json.dumps({"prompt": "x" * 300_000}).encode()
    assert (await told_with(body(whole))).length == 300_000


async def test_the_text_of_a_very_long_body_is_not_hashed() -> None:
    """What else the client says of it counts."""
    whole = json.dumps({"prompt": "x" * MAX_BODY, "prompt_cache_key": "chat"}).encode()
    told = await told_with(body(whole))
    assert (told.length, told.session) == (0, "chat")


async def test_a_named_text_is_part_of_it() -> None:
    told, asked = Told(), await asked_with(body(b'{"prompt": "x"}'))
    await asked.route_by(told, {"prompt": "y" * 9_999})  # type: ignore[arg-type]
    assert told.length == 10_000


async def test_a_session_may_be_named_by_a_header() -> None:
    told = await told_with(body(b"{}"), headers=[(b"x-session-id", b"chat")])
    assert told.session == "chat"


@pytest.mark.parametrize("sent", ["手册".encode(), "café".encode("latin-1"), "café".encode()])
async def test_a_name_in_a_header_is_in_utf_8_or_latin_1(sent: bytes) -> None:
    route = SimpleNamespace(endpoint=SimpleNamespace(__name__="create_completion"))
    asked = await asked_with(body(b"{}"), headers=[(b"x-xavier-prefix", sent)], route=route)
    assert (await asked.keep()).name in ("手册", "café")


async def test_a_client_that_goes_while_it_waits_leaves_the_queue() -> None:
    cluster = Cluster("m-0", request_limit=0, queue=5)
    asked = await asked_with(body(b"{}"))
    with pytest.raises(ClientGoneError):
        await asked.route_by(cluster.router)
    assert not len(cluster.router._queue)


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": "/v1/completions"},
    ],
)
async def test_other_requests_pass(scope: dict[str, Any]) -> None:
    receive, send = receiver(), receiver()
    seen = []

    async def app(*passed: Any) -> None:
        seen.append((*passed, current()))

    await RoutingMiddleware(app)(scope, receive, send)
    assert seen == [(scope, receive, send, None)]


async def test_requests_of_other_routes_ask_for_no_text() -> None:
    """Nobody but their handler reads their body."""
    receive = receiver()

    async def app(scope: Any, passed: Any, send: Any) -> None:
        assert (current(), passed) == (None, receive)

    await RoutingMiddleware(app)(SCOPE, receive, receiver())


async def test_the_route_ends_with_the_request_even_if_it_fails() -> None:
    cluster = Cluster("m-0")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = _asked.get()
        assert asked is not None
        asked.request = Request(scope, receive)
        assert current() is asked
        assert await asked.route_by(cluster.router) is not None
        assert cluster.router._routes
        raise RuntimeError("the handler fails")

    with pytest.raises(RuntimeError, match="the handler fails"):
        await RoutingMiddleware(app)(SCOPE, receiver(body(b"{}")), receiver())
    assert not cluster.router._routes
    assert current() is None

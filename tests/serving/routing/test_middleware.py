"""The middleware remembers requests of text routes, ends their routes, and changes nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from tests.frontend.cluster import Cluster
from xinference_xavier.serving.routing import (
    Asked,
    ClientGoneError,
    RoutingMiddleware,
    _asked,
    current,
)

ROUTE = SimpleNamespace(endpoint=lambda: None)
SCOPE = {"type": "http", "path": "/v1/completions", "headers": [], "route": ROUTE}
BODY = {"type": "http.request", "body": b"{}", "more_body": False}


def receiver(*messages: dict[str, Any]) -> Any:
    left = [*messages]

    async def receive() -> Any:
        return left.pop(0) if left else {"type": "http.disconnect"}

    return receive


async def test_a_client_that_goes_while_it_waits_leaves_the_queue() -> None:
    cluster = Cluster("m-0", request_limit=0, queue=5)
    receive = receiver(BODY)
    asked = Asked(SCOPE, receive)
    asked.request = Request(SCOPE, receive)
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
        await RoutingMiddleware(app)(SCOPE, receiver(BODY), receiver())
    assert not cluster.router._routes
    assert current() is None

"""Holds the answers of our routes against their description."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from xinference_xavier.serving.bodies import Refusal


def client_of_app(app: FastAPI) -> httpx.AsyncClient:
    """Every answer has the documented fields, and no others."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://api",
        event_hooks={"response": [_as_documented(app)]},
    )


def _as_documented(app: FastAPI) -> Callable[[httpx.Response], Awaitable[None]]:
    routes = [route for route in app.routes if isinstance(route, APIRoute)]

    async def check(answer: httpx.Response) -> None:
        method, path = answer.request.method, answer.request.url.path
        streams = not answer.headers["content-type"].startswith("application/json")
        route = next(
            (each for each in routes if each.path_regex.match(path) and method in each.methods),
            None,
        )
        if streams or route is None:
            return
        await answer.aread()
        document: TypeAdapter[Any] = TypeAdapter(
            route.response_model if answer.is_success else Refusal
        )
        as_described = document.dump_python(
            document.validate_python(answer.json()), mode="json", by_alias=True, exclude_unset=True
        )
        assert as_described == answer.json(), f"{method} {path}"
        assert answer.status_code in (route.status_code, *route.responses)

    return check

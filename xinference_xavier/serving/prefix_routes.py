"""Named prefixes in xinference's API process: what requests begin with, and the REST routes.

The tracker of the model has the names; docs/api.md lists the routes' answers and status codes.
"""

import json
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, NamedTuple

from cachetools import LRUCache
from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response

from xinference_xavier.errors import (
    NOT_FOUND_HEADER,
    NamesError,
    PrefixNotFoundError,
    PrefixRefusedError,
)
from xinference_xavier.runtime.aio import in_thread
from xinference_xavier.serving.bodies import PrefixBody, PrefixTerms
from xinference_xavier.serving.gateway import DEADLINE, TrackerGateway
from xinference_xavier.serving.rest import (
    ASK_SCOPE,
    MODEL,
    Access,
    add_route,
    answered_for,
    model_access,
    tenant_of,
    tenant_of_header,
)
from xinference_xavier.tracker.fanout import EXPLAIN_DEADLINE

MAX_REMEMBERED = 64 << 20
"""Bytes of contents that are remembered, as many as a tracker keeps for one model."""


def not_found(error: PrefixNotFoundError) -> HTTPException:
    return HTTPException(404, error.reason, {NOT_FOUND_HEADER: "prefix"})


def is_unknown(error: HTTPException) -> bool:
    """True if the tracker says that there is no such prefix."""
    return (error.headers or {}).get(NOT_FOUND_HEADER) == "prefix"


class _Content(NamedTuple):
    id: str
    content: Mapping[str, Any]
    size: int


class Prefixes:
    """The contents of a process's requests. What has been used here serves them, too, while a
    tracker is away."""

    def __init__(self, trackers: TrackerGateway) -> None:
        self._trackers = trackers
        self._remembered: LRUCache[tuple[str, str, str], _Content] = LRUCache(
            MAX_REMEMBERED, getsizeof=lambda each: each.size
        )

    async def content_of(self, model_uid: str, tenant: str, name: str) -> Mapping[str, Any]:
        """A prefix's content, for a request. Raises HTTPException."""
        key = model_uid, tenant, name
        known = self._remembered.get(key)
        id_ = "" if known is None else known.id
        try:
            asking = self._trackers.call(model_uid, "use_prefix", tenant, name, id_)
            id_, text = await _answered(model_uid, asking)
        except HTTPException as error:
            if known is not None and not is_unknown(error):
                return known.content
            self._remembered.pop(key, None)
            raise
        if text is not None:
            content = await in_thread(json.loads, text)
            self._remembered[key] = known = _Content(id_, content, len(text))
        assert known is not None, "its id was sent"
        return known.content


_PREFIX = f"{MODEL}/prefixes/{{name}}"


def add_prefix_routes(context: Any, trackers: TrackerGateway) -> None:
    """`context` is xinference's APIExtensionContext."""
    routes = PrefixRoutes(trackers, model_access(context))
    add = partial(add_route, context)
    names = f"{MODEL}/prefixes"
    add("GET", names, ASK_SCOPE, routes.list)
    add("POST", names, ASK_SCOPE, routes.add, status=201)
    add("GET", _PREFIX, ASK_SCOPE, routes.show)
    add("PATCH", _PREFIX, ASK_SCOPE, routes.change)
    add("DELETE", _PREFIX, ASK_SCOPE, routes.remove)


class PrefixRoutes:
    def __init__(self, trackers: TrackerGateway, access: Access) -> None:
        self._trackers = trackers
        self._access = access

    async def add(self, model_uid: str, body: PrefixBody, request: Request) -> JSONResponse:
        """Name a text that replicas keep, or replace the one of that name."""
        self._access(request, model_uid)
        new = body.prefix(tenant_of(request, body.cache_salt))
        deadline = EXPLAIN_DEADLINE + DEADLINE
        adding = self._trackers.call(model_uid, "add_prefix", new, deadline=deadline)
        return JSONResponse(await _answered(model_uid, adding), 201)

    async def list(self, model_uid: str, request: Request) -> Response:
        """Named prefixes of a tenant, or those without one."""
        found = await self._call(request, model_uid, "prefixes")
        return Response(b'{"prefixes":%b}' % found, media_type="application/json")

    async def show(self, model_uid: str, name: str, request: Request) -> JSONResponse:
        """A named prefix."""
        return JSONResponse(await self._call(request, model_uid, "prefix", name))

    async def change(
        self, model_uid: str, name: str, body: PrefixTerms, request: Request
    ) -> JSONResponse:
        """Change how it is kept. What is missing stays."""
        changed = await self._call(request, model_uid, "change_prefix", name, body.given)
        return JSONResponse(changed)

    async def remove(self, model_uid: str, name: str, request: Request) -> JSONResponse:
        """Forget the name and its text."""
        await self._call(request, model_uid, "remove_prefix", name)
        return JSONResponse({"removed": name})

    async def _call(self, request: Request, model_uid: str, method: str, *args: object) -> Any:
        self._access(request, model_uid)
        tenant = tenant_of_header(request)
        return await _answered(model_uid, self._trackers.call(model_uid, method, tenant, *args))


async def _answered(model_uid: str, work: Awaitable[Any]) -> Any:
    try:
        return await answered_for(model_uid, work)
    except PrefixNotFoundError as error:
        raise not_found(error) from error
    except PrefixRefusedError as error:
        raise HTTPException(400, error.reason) from error
    except NamesError as error:
        raise HTTPException(503, error.reason) from error

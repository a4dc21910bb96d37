"""The REST routes of named prefixes; docs/api.md has their answers and status codes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response

from xinference_xavier.errors import NOT_FOUND_HEADER, PrefixNotFoundError
from xinference_xavier.frontend.keeper import TICK
from xinference_xavier.frontend.prefix import (
    Prefix,
    read_new,
    read_terms,
)
from xinference_xavier.serving.answers import (
    ASK_SCOPE,
    MODEL,
    Access,
    add_route,
    answered_for,
    model_access,
    tenant_of,
    tenant_of_header,
)
from xinference_xavier.serving.prefixes.install import Prefixes, not_written
from xinference_xavier.serving.sse import Listeners, Message, Stream, message
from xinference_xavier.stats.answers import ENDED

MAX_BODY = 9 << 20
"""Bytes: a prefix may have as many as a question, and its other fields."""

_PIECE = 100
"""Prefixes that are reported at a stretch."""
_PREFIX = f"{MODEL}/prefixes/{{name}}"
_T = TypeVar("_T")


def add_prefix_routes(context: Any, prefixes: Prefixes) -> None:
    """`context` is xinference's APIExtensionContext."""
    routes = PrefixRoutes(prefixes, model_access(context))
    add_route(context, "GET", f"{MODEL}/prefixes", ASK_SCOPE, routes.list)
    add_route(context, "POST", f"{MODEL}/prefixes", ASK_SCOPE, routes.add)
    add_route(context, "GET", _PREFIX, ASK_SCOPE, routes.show)
    add_route(context, "GET", f"{_PREFIX}/events", ASK_SCOPE, routes.events)
    add_route(context, "PATCH", _PREFIX, ASK_SCOPE, routes.change)
    add_route(context, "DELETE", _PREFIX, ASK_SCOPE, routes.remove)


class PrefixRoutes:
    def __init__(self, prefixes: Prefixes, access: Access) -> None:
        self._prefixes = prefixes
        self._access = access
        self._listeners = Listeners()

    async def add(self, model_uid: str, request: Request) -> JSONResponse:
        await self._check(request, model_uid)
        body = await request.body()
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"the body has {len(body)} bytes, more than {MAX_BODY}")
        new = await asyncio.to_thread(_checked, lambda: read_new(body))
        new = new._replace(tenant=tenant_of(request, new.tenant or None))
        added = await _refused(answered_for(model_uid, self._prefixes.keeper.add(model_uid, new)))
        return JSONResponse(added, 201)

    async def list(self, model_uid: str, request: Request) -> Response:
        await self._check(request, model_uid)
        tenant = tenant_of_header(request)
        prefixes = []
        for each in self._prefixes.names.of(model_uid):
            if each.tenant == tenant:
                prefixes.append(self._prefixes.keeper.report(each))
                if len(prefixes) % _PIECE == 0:
                    await asyncio.sleep(0)
        text = await asyncio.to_thread(json.dumps, {"prefixes": prefixes})
        return Response(text, media_type="application/json")

    async def show(self, model_uid: str, name: str, request: Request) -> JSONResponse:
        prefix = await self._find(model_uid, name, request)
        return JSONResponse(self._prefixes.keeper.report(prefix))

    async def events(self, model_uid: str, name: str, request: Request) -> Stream:
        prefix = await self._find(model_uid, name, request)
        return Stream(self._listeners, self._progress(prefix))

    async def _progress(self, prefix: Prefix) -> AsyncIterator[Message]:
        """Until it is kept or has failed."""
        while True:
            known = self._prefixes.names.current(prefix)
            if known is None:
                yield message("gone", {"detail": f"prefix {prefix.name!r} has been removed"})
                return
            report = self._prefixes.keeper.report(known)
            yield message("prefix", report)
            if report["state"] in ENDED:
                return
            await asyncio.sleep(TICK)

    async def change(self, model_uid: str, name: str, request: Request) -> JSONResponse:
        prefix = await self._find(model_uid, name, request)
        body = await request.body()
        terms = _checked(lambda: read_terms(body, prefix.terms))
        changed = await _refused(
            answered_for(model_uid, self._prefixes.keeper.change(prefix, terms))
        )
        return JSONResponse(changed)

    async def remove(self, model_uid: str, name: str, request: Request) -> JSONResponse:
        await _refused(self._prefixes.names.remove(await self._find(model_uid, name, request)))
        return JSONResponse({"removed": name})

    async def _check(self, request: Request, model_uid: str) -> None:
        self._access(request, model_uid)
        await self._prefixes.refresh()

    async def _find(self, model_uid: str, name: str, request: Request) -> Prefix:
        await self._check(request, model_uid)
        try:
            return self._prefixes.names.find(model_uid, tenant_of_header(request), name)
        except PrefixNotFoundError as error:
            raise HTTPException(404, error.reason, {NOT_FOUND_HEADER: "prefix"}) from error


def _checked(check: Callable[[], _T]) -> _T:
    try:
        return check()
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


async def _refused(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    except sqlite3.Error as error:
        raise not_written(error) from error

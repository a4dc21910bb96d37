"""Named prefixes in xinference's API process: it keeps them and puts them before requests.

Also their REST routes; docs/api.md lists their answers and status codes.
"""

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from xinference_xavier.errors import NOT_FOUND_HEADER, PrefixNotFoundError
from xinference_xavier.frontend.keeper import Keeper
from xinference_xavier.frontend.names import Names, Store
from xinference_xavier.frontend.prefix import LORA, Prefix
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
from xinference_xavier.serving.bodies import PrefixBody, PrefixTerms
from xinference_xavier.serving.gateway import TrackerGateway
from xinference_xavier.stats.schema import KnownLoad

FILE = Path("xavier") / "prefixes.db"
"""In xinference's data folder."""
MAX_SHOWN = 100
"""Names in a model's status, which is sent every second."""


def not_found(error: PrefixNotFoundError) -> HTTPException:
    return HTTPException(404, error.reason, {NOT_FOUND_HEADER: "prefix"})


def not_read(error: Exception) -> HTTPException:
    return HTTPException(503, f"the names of prefixes cannot be read: {error}")


class Prefixes:
    """`home` is xinference's data folder."""

    def __init__(self, trackers: TrackerGateway, home: Path) -> None:
        self.names = Names(Store(home / FILE))
        self.keeper = Keeper(self.names, trackers.call, self._ask, self._loads)
        self._trackers = trackers
        trackers.prefixes = self.status

    async def start(self) -> None:
        await self.names.load()
        self.keeper.begin()

    async def close(self) -> None:
        await self.keeper.close()
        await self.names.close()

    async def refresh(self) -> None:
        """Know what other processes have changed. Raises HTTPException if names cannot be read."""
        if self.names.failure:
            raise HTTPException(503, self.names.failure)
        try:
            await self.names.refresh()
        except sqlite3.Error as error:
            raise not_read(error) from error

    async def content_of(self, model_uid: str, tenant: str, name: str) -> Mapping[str, Any]:
        """A prefix's content, for a request. Raises HTTPException."""
        await self.refresh()
        try:
            return await self.names.use(self.names.find(model_uid, tenant, name))
        except PrefixNotFoundError as error:
            raise not_found(error) from error
        except sqlite3.Error as error:
            raise not_read(error) from error

    def status(self, model_uid: str) -> dict[str, Any]:
        """Reports of the names that belong to no tenant, at most `MAX_SHOWN` that were used last,
        how many of all are in each state, and how often their file failed."""
        public = (prefix for prefix in self.names.of(model_uid) if not prefix.tenant)
        shown = nlargest(MAX_SHOWN, public, key=lambda prefix: prefix.used)
        shown.sort(key=lambda prefix: prefix.created)
        return {
            "prefixes": [self.keeper.report(prefix) for prefix in shown],
            "prefix_states": self.keeper.states(model_uid),
        }

    def _loads(self, model_uid: str) -> Mapping[str, KnownLoad]:
        router = self._trackers.routers.get(model_uid)
        return {} if router is None else router.loads()

    async def _ask(
        self, model_uid: str, replica: str, content: Mapping[str, Any], tenant: str, number: str
    ) -> None:
        model = await self._trackers.ask_supervisor("get_model", replica, xavier_replica=True)
        config: dict[str, Any] = {"max_tokens": 1}
        if tenant:
            config["cache_salt"] = tenant
        if LORA in content:
            config[LORA] = content[LORA]
        if "prompt" in content:
            await model.generate(content["prompt"], config, request_id=number)
            return
        if "tools" in content:
            config["tools"] = content["tools"]
        await model.chat(content["messages"], config, request_id=number)


class Starting:
    """ASGI middleware that starts and ends `prefixes` with the server."""

    def __init__(
        self, app: Callable[[Scope, Receive, Any], Awaitable[None]], prefixes: Prefixes
    ) -> None:
        self._app = app
        self._prefixes = prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await self._prefixes.start()
        try:
            await self._app(scope, receive, send)
        finally:
            await self._prefixes.close()


_PIECE = 100
"""Prefixes that are reported at a stretch."""
_PREFIX = f"{MODEL}/prefixes/{{name}}"
_T = TypeVar("_T")


def add_prefix_routes(context: Any, prefixes: Prefixes) -> None:
    """`context` is xinference's APIExtensionContext."""
    routes = PrefixRoutes(prefixes, model_access(context))
    add = partial(add_route, context)
    names = f"{MODEL}/prefixes"
    add("GET", names, ASK_SCOPE, routes.list)
    add("POST", names, ASK_SCOPE, routes.add, status=201)
    add("GET", _PREFIX, ASK_SCOPE, routes.show)
    add("PATCH", _PREFIX, ASK_SCOPE, routes.change)
    add("DELETE", _PREFIX, ASK_SCOPE, routes.remove)


class PrefixRoutes:
    def __init__(self, prefixes: Prefixes, access: Access) -> None:
        self._prefixes = prefixes
        self._access = access

    async def add(self, model_uid: str, body: PrefixBody, request: Request) -> JSONResponse:
        """Name a text that replicas keep, or replace the one of that name."""
        await self._check(request, model_uid)
        new = body.prefix(tenant_of(request, body.cache_salt))
        added = await _refused(answered_for(model_uid, self._prefixes.keeper.add(model_uid, new)))
        return JSONResponse(added, 201)

    async def list(self, model_uid: str, request: Request) -> Response:
        """Named prefixes of a tenant, or those without one."""
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
        """A named prefix."""
        prefix = await self._find(model_uid, name, request)
        return JSONResponse(self._prefixes.keeper.report(prefix))

    async def change(
        self, model_uid: str, name: str, body: PrefixTerms, request: Request
    ) -> JSONResponse:
        """Change how it is kept. What is missing stays."""
        prefix = await self._find(model_uid, name, request)
        terms = body.change(prefix.terms)
        changed = await _refused(
            answered_for(model_uid, self._prefixes.keeper.change(prefix, terms))
        )
        return JSONResponse(changed)

    async def remove(self, model_uid: str, name: str, request: Request) -> JSONResponse:
        """Forget the name and its text."""
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
            raise not_found(error) from error


async def _refused(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    except sqlite3.Error as error:
        detail = f"the names of prefixes cannot be changed: {error}"
        raise HTTPException(503, detail) from error

"""Named prefixes in xinference's API process: it keeps them, and puts them before requests."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from heapq import nlargest
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from starlette.types import Message, Receive

from xinference_xavier.frontend.keeper import Keeper
from xinference_xavier.frontend.names import Names, Store
from xinference_xavier.frontend.prefix import LORA
from xinference_xavier.runtime.aio import within
from xinference_xavier.serving.gateway import TrackerGateway
from xinference_xavier.stats.schema import KnownLoad

FILE = Path("xavier") / "prefixes.db"
"""In xinference's data folder."""
MAX_SHOWN = 100
"""Names in a model's status, which is sent every second."""
_CONNECT_DEADLINE = 5.0


def not_read(error: Exception) -> HTTPException:
    return HTTPException(503, f"the names of prefixes cannot be read: {error}")


def not_written(error: Exception) -> HTTPException:
    return HTTPException(503, f"the names of prefixes cannot be changed: {error}")


class Prefixes:
    """`home` is xinference's data folder."""

    def __init__(self, trackers: TrackerGateway, get_supervisor_ref: Any, home: Path) -> None:
        self.names = Names(Store(home / FILE))
        self.keeper = Keeper(self.names, trackers.call, self._ask, self._loads)
        self._trackers = trackers
        trackers.prefixes = self.status
        self._get_supervisor_ref = get_supervisor_ref

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
        """For a request. Raises PrefixNotFoundError, and HTTPException if it cannot be read."""
        await self.refresh()
        prefix = self.names.find(model_uid, tenant, name)
        try:
            return await self.names.use(prefix)
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
            "prefix_file_failures": self.names.failures,
        }

    def _loads(self, model_uid: str) -> Mapping[str, KnownLoad]:
        router = self._trackers.routers.get(model_uid)
        return {} if router is None else router.loads()

    async def _ask(
        self, model_uid: str, replica: str, content: Mapping[str, Any], tenant: str, number: str
    ) -> None:
        supervisor = await self._get_supervisor_ref()
        finding = supervisor.get_model(replica, xavier_replica=True)
        model: Any = await within(_CONNECT_DEADLINE, finding)
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
        self, app: Callable[[Message, Receive, Any], Awaitable[None]], prefixes: Prefixes
    ) -> None:
        self._app = app
        self._prefixes = prefixes

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await self._prefixes.start()
        try:
            await self._app(scope, receive, send)
        finally:
            await self._prefixes.close()

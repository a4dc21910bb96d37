"""Named prefixes in xinference's API process: it keeps them, and puts them before requests."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from xinference_xavier.frontend.prefixes.keeper import Keeper
from xinference_xavier.frontend.prefixes.names import Names
from xinference_xavier.frontend.prefixes.prefix import LORA
from xinference_xavier.frontend.prefixes.store import SchemaError, Store
from xinference_xavier.frontend.request_body import Message, Receive
from xinference_xavier.runtime.deadline import within
from xinference_xavier.serving.tracker_gateway import TrackerGateway
from xinference_xavier.stats.routing import KnownLoad

logger = logging.getLogger(__name__)

FILE = Path("xavier") / "prefixes.db"
"""In xinference's data folder."""
_CONNECT_DEADLINE = 5.0


class Prefixes:
    """`home` is xinference's data folder."""

    def __init__(self, trackers: TrackerGateway, get_supervisor_ref: Any, home: Path) -> None:
        self.names = Names(Store(home / FILE))
        self.keeper = Keeper(self.names, trackers.call, self._ask, self._loads)
        self.failure = "the server starts; ask again"
        """Why no name is known; empty if they are."""
        self._trackers = trackers
        trackers.prefixes = self.status
        self._get_supervisor_ref = get_supervisor_ref

    async def start(self) -> None:
        """Never fails."""
        try:
            await self.names.load()
        except (OSError, sqlite3.Error, SchemaError) as error:
            self.failure = f"the names of prefixes cannot be read: {error}"
            logger.exception("no prefix is kept")
        else:
            self.failure = ""
            self.keeper.begin()

    async def close(self) -> None:
        await self.keeper.close()
        if not self.failure:
            await self.names.close()

    async def content_of(self, model_uid: str, tenant: str, name: str) -> Mapping[str, Any]:
        """For a request. Raises PrefixNotFoundError."""
        return await self.names.use(self.names.find(model_uid, tenant, name))

    def status(self, model_uid: str) -> dict[str, Any]:
        """Reports of the names that belong to no tenant, and how many are in each state."""
        named = self.names.of(model_uid)
        reports = [(prefix.tenant, self.keeper.report(prefix)) for prefix in named]
        return {
            "prefixes": [report for tenant, report in reports if not tenant],
            "prefix_states": Counter(report["state"] for _, report in reports),
        }

    def _loads(self, model_uid: str) -> Mapping[str, KnownLoad]:
        router = self._trackers.routers.get(model_uid)
        return {} if router is None else router.loads()

    async def _ask(
        self, model_uid: str, replica: str, content: Mapping[str, Any], tenant: str, number: str
    ) -> None:
        supervisor = await self._get_supervisor_ref()
        model: Any = await within(_CONNECT_DEADLINE, supervisor.xavier_replica(replica))
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
    """ASGI middleware that starts `prefixes` with the server."""

    def __init__(
        self, app: Callable[[Message, Receive, Any], Awaitable[None]], prefixes: Prefixes
    ) -> None:
        self._app = app
        self._prefixes = prefixes

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._prefixes.start()
        await self._app(scope, receive, send)

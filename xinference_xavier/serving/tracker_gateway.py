"""The API process's way to the models' trackers, through xinference's supervisor."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import xoscar as xo

from xinference_xavier.errors import NotFoundError
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.addresses import reachable_address
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.tasks import retrieve
from xinference_xavier.stats.report import report
from xinference_xavier.stats.routing import RoutingStats

DEADLINE = 10.0
"""Seconds for any answer except an explanation."""
UNREACHABLE = (OSError, TimeoutError, xo.ServerClosed)


class _Reading(NamedTuple):
    began: float  # monotonic seconds
    report: asyncio.Task[dict[str, Any]]


class TrackerGateway:
    """Belongs to one event loop. `get_supervisor_ref` is xinference's.

    Every method raises NotFoundError for a model that does not share, and one of `UNREACHABLE` if
    the supervisor or the tracker does not answer.
    """

    def __init__(self, get_supervisor_ref: Callable[[], Awaitable[Any]]) -> None:
        self.routers = Routers(self.find)
        self.prefixes: Callable[[str], dict[str, Any]] = lambda model_uid: {}
        """What the status of a model says of its named prefixes."""
        self._get_supervisor_ref = get_supervisor_ref
        self._readings: dict[str, _Reading] = {}

    async def models(self) -> list[str]:
        """The uids of all models that share."""
        return list(await self.ask_supervisor("xavier_models"))

    async def ask_supervisor(self, method: str) -> Any:
        """Raises whatever a supervisor without this extension raises."""

        async def ask() -> Any:
            supervisor = await self._get_supervisor_ref()
            return await getattr(supervisor, method)()

        return await within(DEADLINE, ask())

    async def find(self, model_uid: str) -> Any:
        """A reference to the model's tracker."""

        async def ask() -> Any:
            supervisor = await self._get_supervisor_ref()
            address = await supervisor.xavier_tracker_address(model_uid)
            return await xo.actor_ref(
                address=reachable_address(address, via=supervisor.address),
                uid=tracker_uid(model_uid),
            )

        return await _found(model_uid, within(DEADLINE, ask()))

    async def call(
        self, model_uid: str, method: str, *args: object, deadline: float = DEADLINE
    ) -> Any:
        tracker = await self.find(model_uid)
        return await _found(model_uid, within(deadline, getattr(tracker, method)(*args)))

    async def report(self, model_uid: str) -> dict[str, Any]:
        status = report(await self.call(model_uid, "status"))
        router = self.routers.get(model_uid)
        routing = asdict(RoutingStats()) if router is None else router.report()
        return {**status, "routing": routing, **self.prefixes(model_uid)}

    async def shared_report(self, model_uid: str, max_age: float) -> dict[str, Any]:
        """A report begun at most `max_age` seconds ago, shared by all callers."""
        now = time.monotonic()
        for uid, reading in list(self._readings.items()):
            if now - reading.began > max_age and reading.report.done():
                del self._readings[uid]
        current = self._readings.get(model_uid)
        if current is None:
            current = _Reading(now, asyncio.ensure_future(self.report(model_uid)))
            current.report.add_done_callback(retrieve)
            self._readings[model_uid] = current
        # Shielded: the caller that began the reading may be cancelled while others wait for it.
        return await asyncio.shield(current.report)


async def _found(model_uid: str, call: Awaitable[Any]) -> Any:
    try:
        return await call
    except xo.ActorNotExist as error:
        raise NotFoundError(f"model {model_uid!r} does not share its cache here") from error

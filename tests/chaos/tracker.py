"""The tracker's side of the chaos harness: a tracker, and a worker and a supervisor through which
replicas find it again. Both sides are processes with an xoscar pool."""

import asyncio
import json
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xoscar

from tests.chaos.node import PRELOAD
from tests.harness.remote import Remote, forked, serve_actors
from tests.harness.replicas import MODEL
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.names_file import Prefix

LEASE = 3.0
_TICK = 0.5
_COMPUTE_TIME = 5.0
"""Seconds for a replica to compute a prefix among its other requests."""


class WatchedTracker(BlockTracker):
    """`expired` lists incarnations whose lease ended, and when."""

    def __init__(self, folder: Path) -> None:
        super().__init__(MODEL, lease=LEASE, tick=_TICK, home=folder)
        self.expired: list[tuple[str, float]] = []
        self.asked: dict[str, tuple[str, str]] = {}
        """The replica and the text of each request for a named prefix."""
        self.answered = asyncio.Condition()

    async def _compute(self, replica: str, prefix: Prefix, request_id: str) -> None:
        self.asked[request_id] = replica, json.loads(prefix.content)["prompt"]
        try:
            async with asyncio.timeout(_COMPUTE_TIME), self.answered:
                await self.answered.wait_for(lambda: request_id not in self.asked)
        finally:
            self.asked.pop(request_id, None)

    def _lost(self, incarnation: str) -> None:
        self.expired.append((incarnation, time.monotonic()))
        super()._lost(incarnation)


class _TrackerInside:
    """Each public method is a command, run in the tracker's loop, and so are the tracker's own."""

    def __init__(self, tracker: WatchedTracker, pool: Any) -> None:
        self._tracker = tracker
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    async def expired(self) -> list[tuple[str, float]]:
        return self._tracker.expired

    async def members(self) -> dict[str, set[str]]:
        """Incarnations by namespace."""
        return {
            digest: set(known.journal.leases) for digest, known in self._tracker._namespaces.items()
        }

    async def asked_for_prefixes(self) -> dict[str, tuple[str, str]]:
        return self._tracker.asked

    async def answer(self, request_id: str) -> None:
        async with self._tracker.answered:
            self._tracker.asked.pop(request_id, None)
            self._tracker.answered.notify_all()

    async def actors(self) -> list[str]:
        return [uid.decode() if isinstance(uid, bytes) else uid for uid in self._pool._actors]


class FakeSupervisor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    def __init__(self) -> None:
        super().__init__()
        self.tracker: str | None = None

    async def set_tracker(self, address: str | None) -> None:
        self.tracker = address

    async def xavier_tracker_address(self, model_uid: str, create: bool, *hooks: object) -> str:
        if self.tracker is None:
            raise RuntimeError("no tracker at the moment")
        return self.tracker


class FakeWorker(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    def __init__(self, supervisor: Any) -> None:
        super().__init__()
        self._supervisor = supervisor

    async def get_supervisor_ref(self, add_worker: bool = True) -> Any:
        return self._supervisor


async def _start_tracker(pool: Any, folder: Path) -> _TrackerInside:
    uid = tracker_uid(MODEL)
    address = pool.external_address
    await xoscar.create_actor(WatchedTracker, folder, address=address, uid=uid)
    return _TrackerInside(pool._actors[uid.encode()], pool)


async def _start_host(pool: Any) -> Any:
    address = pool.external_address
    supervisor = await xoscar.create_actor(FakeSupervisor, address=address, uid="supervisor")
    await xoscar.create_actor(FakeWorker, supervisor, address=address, uid="worker")
    return supervisor


def _serve_tracker(pipe: Connection, folder: Path, port: int) -> None:
    serve_actors(pipe, _start_tracker, folder, address=f"127.0.0.1:{port}")


class TrackerNode(Remote):
    """Its commands are the methods of `_TrackerInside`."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(_serve_tracker, folder, port, context=forked(PRELOAD))
        self.address: str = self.wait_until_ready()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


class HostNode(Remote):
    """A worker, and the supervisor that it knows, whose methods are the commands."""

    def __init__(self) -> None:
        super().__init__(serve_actors, _start_host, context=forked(PRELOAD))
        self.address: str = self.wait_until_ready()

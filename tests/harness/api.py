"""Our extension of xinference's API, without xinference: a process with our routes, our parts of a
supervisor and of workers, and a tracker that real replicas can join.
"""

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import uvicorn
import xoscar as xo
from aioprometheus.asgi.starlette import metrics
from aioprometheus.collectors import Registry
from fastapi import APIRouter, FastAPI, HTTPException

from tests.harness.remote import Remote, obey_at_once, spawned
from tests.harness.replicas import MODEL, ReplicaProcess
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.serving.api import add_routes
from xinference_xavier.serving.gateway import (
    TrackerGateway,
    supervisor_process_info,
    worker_process_info,
)
from xinference_xavier.serving.launch import own_trackers
from xinference_xavier.serving.launch.supervisor import xavier_tracker_address
from xinference_xavier.serving.metrics import add_metrics
from xinference_xavier.tracker.actor import BlockTracker


class Supervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The parts of a SupervisorActor that our methods read."""

    xavier_process_info = supervisor_process_info
    xavier_tracker_address = xavier_tracker_address

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home
        self._xavier_cache_mapping: dict[str, Any] = {}
        self._model_uid_to_replica_info: dict[str, Any] = {}
        self._worker_address_to_worker: dict[str, Any] = {}

    @property
    def control_address(self) -> str:
        return str(self.address)

    async def xavier_models(self) -> dict[str, dict[str, str]]:
        """The models of `own_trackers`. Ours would import xinference, which takes long, to look for
        their replicas' workers; there are none here."""
        return {uid: {} for uid in sorted(own_trackers(self))}

    async def add_tracker(self) -> None:
        where = {"address": self.address, "uid": tracker_uid(MODEL)}
        self._xavier_cache_mapping[MODEL] = await xo.create_actor(
            BlockTracker, MODEL, home=self._home, **where
        )

    async def lose_tracker(self) -> None:
        await xo.destroy_actor(self._xavier_cache_mapping[MODEL])
        gc.collect()  # a reference from the same process finds it as long as it is there

    async def add_worker(self) -> None:
        worker = await xo.create_actor(Worker, address=self.address, uid="worker")
        self._worker_address_to_worker[self.address] = worker


class Worker(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    xavier_process_info = worker_process_info


class Service:
    """Knows nobody."""

    async def __call__(self) -> None:
        raise HTTPException(401, "Could not validate credentials")


class ApiProcess(Remote):
    """`endpoint` is open, `guarded` lets nobody in, and `bare` lacks our routes. All other
    attributes are methods of the supervisor."""

    def __init__(self) -> None:
        self._home = TemporaryDirectory()
        super().__init__(_run, self._home.name, context=spawned())
        self.address, port = self.wait_until_ready()
        self.endpoint, self.guarded, self.bare = (
            f"http://127.0.0.1:{port}/{name}" for name in ("open", "guarded", "bare")
        )

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self.call, method)


class Pair(NamedTuple):
    """A healthy pair of replicas behind an API, for all tests that use the fixture `pair`."""

    api: ApiProcess
    first: ReplicaProcess
    second: ReplicaProcess


def _run(pipe: Connection, home: str) -> None:
    asyncio.run(_serve(pipe, Path(home)))


async def _serve(pipe: Connection, home: Path) -> None:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    address = pool.external_address
    supervisor = await xo.create_actor(Supervisor, home, address=address, uid="supervisor")
    await supervisor.add_worker()
    await supervisor.add_tracker()
    app = FastAPI()
    app.mount("/open", _application(supervisor))
    app.mount("/guarded", _application(supervisor, guarded=True))
    app.mount("/bare", FastAPI())
    with socket.create_server(("127.0.0.1", 0)) as listening:  # whoever connects early waits
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        about = (address, listening.getsockname()[1])
        commands = asyncio.ensure_future(obey_at_once(pipe, supervisor, about))
        await asyncio.wait({serving, commands}, return_when=asyncio.FIRST_COMPLETED)
        os._exit(0)


def _application(supervisor: Any, *, guarded: bool = False) -> FastAPI:
    app, router = FastAPI(), APIRouter()

    async def get_supervisor_ref() -> Any:
        return supervisor

    context = SimpleNamespace(
        app=app,
        router=router,
        auth_service=Service(),
        auth_enabled=guarded,
        get_supervisor_ref=get_supervisor_ref,
    )
    app.state.registry = Registry()  # one per application, as in separate processes
    app.add_route("/metrics", metrics)
    trackers = TrackerGateway(get_supervisor_ref)
    add_routes(context, trackers)
    add_metrics(context, trackers)
    app.include_router(router)
    return app

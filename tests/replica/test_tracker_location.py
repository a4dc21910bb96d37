"""A replica finds a lost tracker again through its worker, which knows the supervisor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotFoundError
from xinference_xavier.replica.tracker_client import TrackerLocation

CONFIGURED = "10.0.0.1:9999"


class Supervisor(xo.StatelessActor):
    """Has the tracker of "running" in its own pool, at an address with a wildcard."""

    def __init__(self) -> None:
        super().__init__()
        self._known = {"running"}

    async def xavier_tracker_address(self, model_uid: str, create: bool, hooks: str | None) -> str:
        assert create
        assert hooks == "a:hook"
        if model_uid not in self._known:
            raise NotFoundError(f"model {model_uid!r} is not running here")
        return "0.0.0.0:7777"

    async def add_worker(self, model_uid: str) -> None:
        self._known.add(model_uid)


class Worker(xo.StatelessActor):
    """Runs "forgotten", which the supervisor learns when the worker registers again."""

    def __init__(self, supervisor: Any) -> None:
        super().__init__()
        self._supervisor = supervisor

    async def get_supervisor_ref(self, add_worker: bool) -> Any:
        if add_worker:
            await self._supervisor.add_worker("forgotten")
        return self._supervisor


@pytest.fixture
async def worker_address() -> AsyncIterator[str]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    async with pool:
        address = pool.external_address
        supervisor = await xo.create_actor(Supervisor, address=address, uid="supervisor")
        await xo.create_actor(Worker, supervisor, address=address, uid="worker")
        yield address


def location_of(model_uid: str, worker_address: str) -> TrackerLocation:
    config = XavierConfig(model_uid, CONFIGURED, hooks="a:hook", worker_address=worker_address)
    return TrackerLocation(config)


async def test_the_configured_address_is_tried_first(worker_address: str) -> None:
    location = location_of("running", worker_address)
    assert await location.find() == CONFIGURED


async def test_after_a_loss_the_workers_supervisor_is_asked(worker_address: str) -> None:
    location = location_of("running", worker_address)
    await location.find()
    assert await location.find() == "127.0.0.1:7777"


async def test_a_supervisor_that_does_not_know_the_model_yet_changes_nothing(
    worker_address: str,
) -> None:
    location = location_of("other", worker_address)
    await location.find()
    assert await location.find() == CONFIGURED


async def test_a_restarted_supervisor_learns_of_the_model(worker_address: str) -> None:
    """The replica asks its worker to register at once; by itself it does so only every 15 s."""
    location = location_of("forgotten", worker_address)
    await location.find()
    assert await location.find() == CONFIGURED
    assert await location.find() == "127.0.0.1:7777"


async def test_without_a_worker_there_is_only_the_configured_address() -> None:
    location = TrackerLocation(XavierConfig("running", CONFIGURED))
    await location.find()
    assert await location.find() == CONFIGURED


async def test_a_lost_worker_is_an_error_for_the_caller_to_retry() -> None:
    location = TrackerLocation(XavierConfig("running", CONFIGURED, worker_address="127.0.0.1:1"))
    await location.find()
    with pytest.raises(OSError, match="Connect call failed"):
        await location.find()

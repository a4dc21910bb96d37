"""A launch waits until its replicas can serve each other, but never for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.config import XavierConfig
from xinference_xavier.protocol.tracker import INITIAL_SETTINGS, Member, tracker_uid
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.serving.launch import worker as module
from xinference_xavier.tracker.actor import BlockTracker

NS = "namespace"
PATIENCE = 60.0


class Worker:
    def __init__(self) -> None:
        self._model_uid_to_model: dict[str, object] = {"m-rep0": object()}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(module, "_PATIENCE", PATIENCE)


async def join(tracker: Any, name: str, incarnation: str) -> None:
    member = Member(incarnation, "127.0.0.1:1", serves=False)
    await tracker.join(NS, member, 36, INITIAL_SETTINGS, name)


def waiting(worker: Worker, address: str, engines: int = 1) -> asyncio.Task[None]:
    config = XavierConfig("m", address)
    return asyncio.create_task(module.wait_until_serving(worker, "m-rep0", config, engines))


async def still_waits(task: asyncio.Task[None], tracker: Any) -> bool:
    """After another look at the tracker."""
    asked = asyncio.ensure_future(tracker.was_asked_twice())
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    return not task.done()


async def test_it_waits_until_its_replica_serves(tracker: Any, address: str) -> None:
    await join(tracker, "m-rep1", "b")
    await tracker.set_serving(NS, "b", True)
    task = waiting(Worker(), address)
    assert await still_waits(task, tracker)
    await join(tracker, "m-rep0", "a")
    assert await still_waits(task, tracker)
    await tracker.set_serving(NS, "a", True)
    await task


async def test_it_waits_for_all_engines_of_a_replica(tracker: Any, address: str) -> None:
    task = waiting(Worker(), address, engines=2)
    for name in ("a", "b"):
        assert await still_waits(task, tracker)
        await join(tracker, f"m-rep0_dp{'ab'.index(name)}", name)
        await tracker.set_serving(NS, name, True)
    await task


async def test_one_that_was_lost_does_not_stand_for_its_successor(
    tracker: Any, address: str
) -> None:
    """Its lease has not ended yet."""
    await join(tracker, "m-rep0", "lost")
    await tracker.set_serving(NS, "lost", True)
    await join(tracker, "m-rep0", "new")
    task = waiting(Worker(), address)
    assert await still_waits(task, tracker)
    await tracker.set_serving(NS, "new", True)
    await task


async def test_a_replica_that_never_serves_is_launched_all_the_same(
    tracker: Any, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    await join(tracker, "m-rep0", "a")
    await waiting(Worker(), address)
    assert "peers cannot fetch from this replica yet" in caplog.text
    assert "replica=m-rep0" in caplog.text


class Warming:
    """A replica that fetches what its peers use most."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.done = asyncio.Event()

    async def warm_join(self) -> None:
        self.asked.set()
        await self.done.wait()


class WarmingActor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    def __init__(self, replica: Warming) -> None:
        super().__init__()
        self.warm_join = replica.warm_join


async def test_it_waits_until_its_replica_is_warm(tracker: Any, address: str) -> None:
    warming = Warming()
    await xo.create_actor(WarmingActor, warming, address=address, uid=replica_uid("a"))
    member = Member("a", address, serves=False)
    await tracker.join(NS, member, 36, INITIAL_SETTINGS, "m-rep0")
    await tracker.set_serving(NS, "a", True)
    task = waiting(Worker(), address)
    await asyncio.wait_for(warming.asked.wait(), PATIENCE)
    assert not task.done()
    warming.done.set()
    await task


async def test_a_tracker_that_comes_later_is_asked(address: str) -> None:
    task = waiting(Worker(), address)
    tracker = await xo.create_actor(BlockTracker, "m", address=address, uid=tracker_uid("m"))
    await join(tracker, "m-rep0", "a")
    await tracker.set_serving(NS, "a", True)
    await task


async def test_it_does_not_wait_for_a_model_that_is_gone(
    tracker: Any, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    task = waiting(worker, address)
    assert await still_waits(task, tracker)
    worker._model_uid_to_model.clear()
    await task
    assert "cannot fetch" not in caplog.text

"""A cancelled launch leaves no replica that is still loading, no tracker, and its uid free.

The supervisor is the stand-in of `launching`; the actor pool and the tracker are real.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.serving.launch.launching import has_tracker, launched_at_once, start
from xinference_xavier.errors import LaunchCancelledError
from xinference_xavier.serving.launch import supervisor as module

UID = "m"


@dataclass
class Worker:
    """Its replicas load until they are terminated, which it may refuse, or do when it `may`."""

    refuses: Exception | None = None
    may: asyncio.Event | None = None
    terminated: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def terminate_model(self, model_uid: str) -> None:
        if self.refuses is not None:
            raise self.refuses
        if self.may is not None:
            await self.may.wait()
        self.terminated.append(model_uid)
        self.over.set()


@dataclass
class ReplicaInfo:
    replica_to_worker_refs: dict[int, list[Worker]]

    @property
    def active_replica_ids(self) -> list[int]:
        return list(self.replica_to_worker_refs)


async def launch_until_loading(supervisor: Any, workers: list[Worker]) -> asyncio.Task[Any]:
    loading = asyncio.Event()

    async def load(self: Any, model_uid: str) -> None:
        refs = {number: [worker] for number, worker in enumerate(workers)}
        self._model_uid_to_replica_info[model_uid] = ReplicaInfo(refs)
        loading.set()
        for worker in workers:
            await worker.over.wait()

    supervisor.start = load
    launch = asyncio.create_task(start(supervisor))
    await loading.wait()
    return launch


async def test_replicas_that_load_are_terminated_and_nothing_stays(supervisor: Any) -> None:
    """4.1's own cancel would let them load on and the launch end well."""
    workers = [Worker(), Worker()]
    launch = await launch_until_loading(supervisor, workers)
    assert await has_tracker(supervisor)
    await supervisor.cancel_launch_builtin_model(UID)
    assert [worker.terminated for worker in workers] == [[f"{UID}-rep0"], [f"{UID}-rep1"]]
    with pytest.raises(LaunchCancelledError, match="the launch of model 'm' was cancelled"):
        await launch
    assert not await has_tracker(supervisor)
    assert UID not in supervisor._xavier_cache_mapping


@pytest.mark.parametrize("refusal", [ValueError("it is launching"), ConnectionRefusedError()])
async def test_one_that_cannot_be_terminated_keeps_no_other_from_it(
    supervisor: Any, refusal: Exception
) -> None:
    """xinference's own cancel was in time for it, or its worker is gone."""
    early, late = Worker(refusal), Worker()
    launch = await launch_until_loading(supervisor, [early, late])
    await supervisor.cancel_launch_builtin_model(UID)
    assert (early.terminated, late.terminated) == ([], [f"{UID}-rep1"])
    early.over.set()
    with pytest.raises(LaunchCancelledError):
        await launch


async def test_a_replica_that_takes_its_time_ends_all_the_same(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine cannot be interrupted while it loads; the cancel itself does not wait for it."""
    monkeypatch.setattr(module, "_PATIENCE", 0.01)
    slow = Worker(may=asyncio.Event())
    launch = await launch_until_loading(supervisor, [slow])
    await supervisor.cancel_launch_builtin_model(UID)
    assert slow.terminated == []
    assert slow.may is not None
    slow.may.set()
    with pytest.raises(LaunchCancelledError):
        await launch
    assert slow.terminated == [f"{UID}-rep0"]


async def test_the_uid_is_free_although_xinference_remembers_who_had_the_replicas(
    supervisor: Any,
) -> None:
    """4.1 forgets only those of a model that it still lists."""
    workers = [Worker(), Worker()]
    books = (
        supervisor._replica_model_uid_to_worker,
        supervisor._replica_model_uid_to_worker_shards,
    )
    other = {f"{UID}-other-rep0": Worker(), f"{UID}-replica-rep1": Worker()}
    for book in books:
        book.update(other)
        book[f"{UID}-rep0"] = workers[0]
    launch = await launch_until_loading(supervisor, workers)
    await supervisor.cancel_launch_builtin_model(UID)
    with pytest.raises(LaunchCancelledError):
        await launch
    assert books == (other, other)
    books[0][f"{UID}-rep1"] = workers[1]  # this one was late
    supervisor.start = launched_at_once
    await start(supervisor)
    assert books[0] == other


async def test_models_that_do_not_share_are_not_ours_to_terminate(supervisor: Any) -> None:
    worker = Worker()
    supervisor._model_uid_to_replica_info[UID] = ReplicaInfo({0: [worker]})
    await supervisor.cancel_launch_builtin_model(UID)
    assert worker.terminated == []

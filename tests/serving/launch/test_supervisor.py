"""A launch with sharing is one transaction around xinference's own, however it ends.

The supervisor is the stand-in of `launching`; the actor pool and the tracker are real.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import xoscar as xo

from tests.logged import records
from tests.serving.launch.launching import (
    config_of,
    has_tracker,
    launched_at_once,
    start,
    supervisor_class,
)
from xinference_xavier.errors import (
    ConfigError,
    LaunchCancelledError,
    NotFoundError,
    ReplicaNotServingError,
)
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.serving.launch import supervisor as module
from xinference_xavier.serving.launch.supervisor import xavier_models


async def test_the_tracker_exists_before_the_first_replica(supervisor: Any) -> None:
    seen: list[bool] = []

    async def look(self: Any, model_uid: str) -> None:
        seen.append(await has_tracker(self) and model_uid in self._xavier_cache_mapping)

    supervisor.start = look
    assert await start(supervisor) == "m"
    assert seen == [True]
    assert await has_tracker(supervisor)


async def test_a_missing_uid_is_made_before_the_tracker_and_arguments_may_have_no_names(
    supervisor: Any,
) -> None:
    launched = supervisor._launch_builtin_model(None, "qwen", "vllm", None, 2, enable_xavier=True)
    assert await launched == "qwen-generated"
    assert config_of(supervisor.calls[0]).model_uid == "qwen-generated"
    assert await has_tracker(supervisor, "qwen-generated")


async def no_memory(supervisor: Any, model_uid: str) -> None:
    raise RuntimeError("no memory")


async def fails_and_is_cleaned_up(supervisor: Any, model_uid: str) -> None:
    """xinference has destroyed the tracker before we do."""
    await xo.destroy_actor(supervisor._xavier_cache_mapping.pop(model_uid))
    raise RuntimeError("no memory")


async def is_cancelled(supervisor: Any, model_uid: str) -> None:
    raise asyncio.CancelledError


async def is_listed_no_more(supervisor: Any, model_uid: str) -> None:
    del supervisor._model_uid_to_replica_info[model_uid]


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        (no_memory, RuntimeError),
        (fails_and_is_cleaned_up, RuntimeError),
        (is_cancelled, asyncio.CancelledError),
        (is_listed_no_more, LaunchCancelledError),
    ],
)
async def test_a_launch_that_fails_leaves_nothing_and_can_be_repeated(
    supervisor: Any, caplog: pytest.LogCaptureFixture, ends: Any, error: type[BaseException]
) -> None:
    supervisor.start = ends
    with pytest.raises(error):
        await start(supervisor)
    assert supervisor._xavier_cache_mapping == {}
    assert not await has_tracker(supervisor)
    assert not [record for record in records(caplog) if record.levelname == "WARNING"]
    supervisor.start = launched_at_once
    await start(supervisor)
    assert await has_tracker(supervisor)


@dataclass
class Loading:
    """A worker whose replica loads until it is terminated, which it may refuse, or do when it
    `may`."""

    refuses: Exception | None = None
    may: asyncio.Event | None = None
    terminated: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def terminate_model(self, model_uid: str) -> None:
        if self.refuses is not None:
            self.over.set()
            raise self.refuses
        if self.may is not None:
            await self.may.wait()
        self.terminated.append(model_uid)
        self.over.set()


@pytest.mark.parametrize(
    "first",
    [
        Loading,
        lambda: Loading(ValueError("xinference's own cancel was in time for it")),
        lambda: Loading(ConnectionRefusedError("its worker is gone")),
        lambda: Loading(may=asyncio.Event()),
    ],
    ids=["loads", "is terminated already", "is lost", "cannot be interrupted"],
)
async def test_a_cancelled_launch_leaves_no_replica_that_loads_and_its_uid_is_free(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch, first: Callable[[], Loading]
) -> None:
    """4.1's own cancel would let them load on, and keep their workers on record. Ours does not wait
    for an engine that takes its time."""
    monkeypatch.setattr(module, "_PATIENCE", 0.01)
    workers, loading = [first(), Loading()], asyncio.Event()
    books = (
        supervisor._replica_model_uid_to_worker,
        supervisor._replica_model_uid_to_worker_shards,
    )
    other = {"m-other-rep0": Loading(), "m-replica-rep1": Loading()}
    for book in books:
        book.update({**other, "m-rep0": workers[0]})

    async def load(self: Any, model_uid: str) -> None:
        refs = {number: [worker] for number, worker in enumerate(workers)}
        info = SimpleNamespace(active_replica_ids=[*refs], replica_to_worker_refs=refs)
        self._model_uid_to_replica_info[model_uid] = info
        loading.set()
        for worker in workers:
            await worker.over.wait()

    supervisor.start = load
    launch = asyncio.create_task(start(supervisor))
    await loading.wait()
    assert await has_tracker(supervisor)
    await supervisor.cancel_launch_builtin_model("m")
    if workers[0].may is not None:
        assert workers[0].terminated == []
        workers[0].may.set()
    with pytest.raises(LaunchCancelledError, match="the launch of model 'm' was cancelled"):
        await launch
    ended = [] if workers[0].refuses else ["m-rep0"]
    assert [worker.terminated for worker in workers] == [ended, ["m-rep1"]]
    assert supervisor._xavier_cache_mapping == {}
    assert not await has_tracker(supervisor)
    assert books == (other, other)
    books[0]["m-rep1"] = workers[1]  # this one was late
    supervisor.start = launched_at_once
    await start(supervisor)
    assert books[0] == other


async def test_models_that_do_not_share_are_not_ours_to_terminate(supervisor: Any) -> None:
    worker = Loading()
    info = SimpleNamespace(active_replica_ids=[0], replica_to_worker_refs={0: [worker]})
    supervisor._model_uid_to_replica_info["m"] = info
    await supervisor.cancel_launch_builtin_model("m")
    assert worker.terminated == []


async def test_a_second_launch_of_the_uid_does_not_touch_the_first_ones_tracker(
    supervisor: Any,
) -> None:
    begun, proceed = asyncio.Event(), asyncio.Event()

    async def slow(self: Any, model_uid: str) -> None:
        if begun.is_set():
            return
        begun.set()
        await proceed.wait()
        await launched_at_once(self, model_uid)

    supervisor.start = slow
    first = asyncio.create_task(start(supervisor))
    await begun.wait()
    with pytest.raises(ConfigError, match="running or being launched"):
        await start(supervisor)
    proceed.set()
    await first
    with pytest.raises(ConfigError, match="running or being launched"):
        await start(supervisor)
    assert await has_tracker(supervisor)
    assert len(supervisor.calls) == 1


async def test_a_tracker_left_by_an_earlier_supervisor_is_taken_over(supervisor: Any) -> None:
    await start(supervisor)
    tracker = await xo.actor_ref(address=supervisor.control_address, uid=tracker_uid("m"))
    await tracker.set_enabled(False)
    successor = supervisor_class()(supervisor.control_address)
    await start(successor)
    assert not (await tracker.status())["enabled"]
    assert "m" in successor._xavier_cache_mapping


async def test_replicas_find_a_tracker_and_make_a_missing_one_once(supervisor: Any) -> None:
    """A new supervisor knows the model from its workers, but has no tracker."""
    supervisor._model_uid_to_replica_info["m"] = object()
    with pytest.raises(NotFoundError, match="does not share"):
        await supervisor.xavier_tracker_address("m")
    both = await asyncio.gather(
        supervisor.xavier_tracker_address("m", create=True),
        supervisor.xavier_tracker_address("m", create=True),
    )
    assert both == [supervisor.control_address] * 2
    assert await supervisor.xavier_tracker_address("m") == supervisor.control_address
    # xinference destroys what it finds here when the model ends.
    await xo.destroy_actor(supervisor._xavier_cache_mapping["m"])
    assert not await has_tracker(supervisor)


async def test_no_tracker_is_made_for_a_model_that_does_not_run(supervisor: Any) -> None:
    with pytest.raises(NotFoundError, match="is not running here"):
        await supervisor.xavier_tracker_address("m", create=True)
    assert not await has_tracker(supervisor)


async def test_a_model_terminated_meanwhile_keeps_no_tracker(supervisor: Any) -> None:
    supervisor._model_uid_to_replica_info["m"] = object()
    asking = asyncio.create_task(supervisor.xavier_tracker_address("m", create=True))
    # One turn of the loop: the model was seen running, the tracker is being made.
    await asyncio.sleep(0)
    supervisor._model_uid_to_replica_info.clear()
    with pytest.raises(NotFoundError, match="terminated meanwhile"):
        await asking
    assert not await has_tracker(supervisor)


async def test_models_that_share_have_a_tracker_of_ours_and_name_the_workers_of_their_replicas(
    supervisor: Any,
) -> None:
    """xinference's built-in Xavier keeps its own trackers in the same place."""
    for model_uid, uid in (("m", tracker_uid("m")), ("a", tracker_uid("a")), ("c", "another")):
        supervisor._xavier_cache_mapping[model_uid] = SimpleNamespace(uid=uid.encode())
    supervisor._model_uid_to_replica_info["m"] = SimpleNamespace(active_replica_ids=[0, 1, 2])
    one, other = (SimpleNamespace(address=f"10.0.0.{number}:1") for number in (1, 2))
    supervisor._replica_model_uid_to_worker = {"m-rep0": one, "m-rep1": (other, one)}
    expected = {"m-rep0": "10.0.0.1:1", "m-rep1": "10.0.0.2:1"}
    found = await xavier_models(supervisor)
    assert found == {"a": {}, "m": expected}, "the last has just been removed"


# -- the model actor of a replica -------------------------------------------------------------


class Worker:
    async def get_model(self, model_uid: str) -> str:
        return f"model actor of {model_uid}"


class StoppingWorker:
    async def get_model(self, model_uid: str) -> str:
        raise RuntimeError(f"Model {model_uid} is in stopping state")


@pytest.mark.parametrize(
    ("workers", "replica", "known_as"),
    [
        ({"m-rep0": None, "m-rep1": Worker()}, "m-rep1", "m-rep1"),
        ({"m-rep0": (Worker(), None)}, "m-rep0", "m-rep0"),
        ({"m-rep0": Worker()}, "m-rep0_dp1", "m-rep0"),
    ],
    ids=["one of two replicas", "several workers", "data parallelism"],
)
async def test_the_first_worker_of_a_replica_knows_its_model_actor(
    supervisor: Any, workers: dict[str, Any], replica: str, known_as: str
) -> None:
    """A method of xinference's own asks, because it reaches a supervisor that is relaunched."""
    supervisor._replica_model_uid_to_worker = workers
    found = await supervisor.get_model(replica, xavier_replica=True)
    assert found == f"model actor of {known_as}"
    assert await supervisor.get_model("m", other=1) == ("m", {"other": 1})


@pytest.mark.parametrize("workers", [{}, {"m-rep0": StoppingWorker()}], ids=["ended", "ends"])
async def test_a_replica_that_ends_or_has_ended_takes_no_requests(
    supervisor: Any, workers: dict[str, Any]
) -> None:
    supervisor._replica_model_uid_to_worker = workers
    with pytest.raises(ReplicaNotServingError, match="replica m-rep0 takes no requests"):
        await supervisor.get_model("m-rep0", xavier_replica=True)

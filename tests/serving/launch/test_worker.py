"""A failed load says what the engine said, and a launch waits until its replicas can serve each
other, but never for long. `test_table.py` has what a worker does to a launch."""

import asyncio
from typing import Any

import pytest
import xoscar as xo

from tests.serving.launch.launching import Worker, config_of
from tests.tracker_pools import create_tracker
from xinference_xavier.config import XavierConfig, kv_transfer_config
from xinference_xavier.errors import ReplicaStartError
from xinference_xavier.protocol.tracker import INITIAL_SETTINGS, Member
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.serving import extension
from xinference_xavier.serving.launch import environment
from xinference_xavier.serving.launch import worker as module

NS = "namespace"
PATIENCE = 60.0
TRACKER = "0.0.0.0:9999"


async def launch(worker: Worker, config: XavierConfig, **arguments: Any) -> dict[str, Any]:
    """Returns what xinference keeps of the launch."""
    transfer = kv_transfer_config(config)
    return await worker.launch_builtin_model("m-rep0", kv_transfer_config=transfer, **arguments)


async def test_a_replica_says_which_pin_was_replaced_also_when_its_launch_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What xinference keeps of the launch names the vLLM that has taken its place."""
    monkeypatch.setattr(environment, "_installed", lambda: None)
    monkeypatch.setattr(environment.seam, "defined_packages", lambda _: ["vllm==0.21.0"])
    monkeypatch.setattr(environment, "resolve", lambda *_: environment.Resolution({}))
    own = {"model_name": "a", "model_engine": "vLLM", "enable_virtual_env": True}
    kept = await launch(Worker(), XavierConfig("m", TRACKER), **own)
    assert kept["virtual_env_packages"] == ["vllm<0.34,>=0.31"]
    again = await Worker().launch_builtin_model("m-rep0", **kept)
    assert [config_of(each).replaced_vllm for each in (kept, again)] == ["==0.21.0"] * 2


class RacingWorker(Worker):
    """Another replica has just made the link of the model's files."""

    raced = False

    async def launch_builtin_model(self, model_uid: str, **kwargs: Any) -> dict[str, Any]:
        if not self.raced:
            self.raced = True
            raise FileExistsError(17, "File exists", "/models/a", "/cache/m")
        return await Worker.launch_builtin_model(self, model_uid, **kwargs)


extension.wrap_worker(RacingWorker)


async def test_a_replica_that_lost_the_race_for_a_link_is_launched_again() -> None:
    kept = await launch(RacingWorker(), XavierConfig("m", TRACKER))
    assert config_of(kept).worker_address == "127.0.0.1:70"


async def test_launches_of_others_are_left_alone() -> None:
    other: dict[str, Any] = {"kv_transfer_config": {"kv_connector": "Other"}, "xavier_config": None}
    worker = Worker(loads=True)
    assert await worker.launch_builtin_model("m-rep0", **other) == other
    await worker.wait_for_load("m-rep0")
    assert worker.states == {"m-rep0": "ready"}, "it waits for nothing"
    with pytest.raises(RuntimeError, match="See root cause above"):
        await Worker().wait_for_load("m-rep0")


# -- when an engine has loaded ----------------------------------------------------------------


async def test_a_failed_load_says_what_the_engine_left_with_the_tracker(
    tracker: Any, address: str
) -> None:
    worker = Worker()
    await launch(worker, XavierConfig("m", address))
    with pytest.raises(RuntimeError, match="See root cause above"):
        await worker.wait_for_load("m-rep0")
    await tracker.report_startup_error("m-rep0", "the pool is too small")
    with pytest.raises(ReplicaStartError, match="the pool is too small"):
        await worker.wait_for_load("m-rep0")
    await xo.destroy_actor(tracker)
    with pytest.raises(RuntimeError, match="See root cause above"):
        await worker.wait_for_load("m-rep0")


@pytest.mark.parametrize("state", ["error", "stopping", "stopped"])
async def test_other_states_are_told_at_once(address: str, state: str) -> None:
    worker = Worker()
    await launch(worker, XavierConfig("m", address))
    await worker._update_model_state("m-rep0", state)
    assert worker.states == {"m-rep0": state}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(module, "_PATIENCE", PATIENCE)


class Loading:
    """A replica whose engines have loaded, so that its worker waits until it can serve."""

    def __init__(self, address: str, engines: int = 1, **config: Any) -> None:
        self.worker = Worker(loads=True)
        self._config, self._engines = XavierConfig("m", address, **config), engines
        self._task = asyncio.create_task(self._load())

    async def _load(self) -> None:
        await launch(self.worker, self._config, data_parallel_size=self._engines)
        await self.worker.wait_for_load("m-rep0")

    async def waits(self, tracker: Any) -> bool:
        """Whether its launch goes on waiting after another look at the tracker."""
        asked = asyncio.ensure_future(tracker.was_asked_twice())
        await asyncio.wait({self._task, asked}, return_when=asyncio.FIRST_COMPLETED)
        return not self._task.done()

    async def is_ready(self) -> bool:
        """Whether the replica is ready once its worker no longer waits."""
        await self._task
        return self.worker.states == {"m-rep0": "ready"}


async def join(
    tracker: Any, name: str, incarnation: str, *, address: str = "127.0.0.1:1", serves: bool = False
) -> None:
    member = Member(incarnation, address, serves=False)
    await tracker.join(NS, member, INITIAL_SETTINGS, name)
    if serves:
        await tracker.set_serving(NS, incarnation, True)


Join = tuple[str, str, bool]
"""The engine that joins, its replica, and if it serves."""


@pytest.mark.parametrize(
    ("engines", "before", "steps"),
    [
        (1, [("m-rep1", "b", True)], [("m-rep0", "a", False), ("m-rep0", "a", True)]),
        (2, [], [("m-rep0_dp0", "a", True), ("m-rep0_dp1", "b", True)]),
        (1, [("m-rep0", "lost", True), ("m-rep0", "a", False)], [("m-rep0", "a", True)]),
    ],
    ids=["one", "two engines", "the successor of one that was lost, whose lease has not ended"],
)
async def test_a_replica_is_ready_once_all_of_its_engines_serve(
    tracker: Any, address: str, engines: int, before: list[Join], steps: list[Join]
) -> None:
    for name, incarnation, serves in before:
        await join(tracker, name, incarnation, serves=serves)
    loading = Loading(address, engines)
    for name, incarnation, serves in steps:
        assert await loading.waits(tracker)
        assert loading.worker.states == {}
        await join(tracker, name, incarnation, serves=serves)
    assert await loading.is_ready()


async def test_a_replica_that_never_serves_is_launched_all_the_same(
    tracker: Any,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    await join(tracker, "m-rep0", "a")
    assert await Loading(address, warm_join=0.0).is_ready()
    assert "peers cannot fetch from this replica yet" in caplog.text
    assert "replica=m-rep0" in caplog.text


class Warming(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A replica whose fetches at its start end when they `may`."""

    def __init__(self, asked: asyncio.Event, may: asyncio.Event) -> None:
        super().__init__()
        self._asked, self._may = asked, may

    async def warm_join(self) -> None:
        self._asked.set()
        await self._may.wait()


async def test_a_replica_is_ready_once_it_has_what_it_fetches_at_its_start(
    tracker: Any, address: str
) -> None:
    asked, may = asyncio.Event(), asyncio.Event()
    await xo.create_actor(Warming, asked, may, address=address, uid=replica_uid("a"))
    await join(tracker, "m-rep0", "a", address=address, serves=True)
    loading = Loading(address)
    await asyncio.wait_for(asked.wait(), PATIENCE)
    assert loading.worker.states == {}
    may.set()
    assert await loading.is_ready()


async def test_a_tracker_that_comes_later_is_asked(address: str) -> None:
    loading = Loading(address)
    tracker = await create_tracker(address, "m")
    await join(tracker, "m-rep0", "a", serves=True)
    assert await loading.is_ready()


async def test_a_replica_that_is_terminated_meanwhile_is_not_called_ready(
    tracker: Any, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    loading = Loading(address)
    assert await loading.waits(tracker)
    loading.worker._model_uid_to_model.clear()
    assert not await loading.is_ready()
    assert loading.worker.states == {}
    assert "cannot fetch" not in caplog.text

"""A worker puts itself into our configuration, a failed load says what the engine said, and a
replica is ready when it can serve."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import xoscar as xo

from tests.serving.launch.launching import config_of
from xinference_xavier.config import XavierConfig, kv_transfer_config
from xinference_xavier.errors import ConfigError, ReplicaStartError
from xinference_xavier.protocol.tracker import INITIAL_SETTINGS, Member, tracker_uid
from xinference_xavier.serving.launch import install
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.vllm_versions import SHARES, UNTESTED


class Worker:
    address = "0.0.0.0:70"
    _supervisor_address = "10.0.0.1:9999"

    def __init__(self, loads: bool = False) -> None:
        self._loads = loads
        self._model_uid_to_launch_args: dict[str, dict[str, Any]] = {}
        self._model_uid_to_model: dict[str, object] = {}
        self.states: dict[str, str] = {}

    async def launch_builtin_model(self, model_uid: str, **kwargs: Any) -> dict[str, Any]:
        # xinference keeps what arrives here and replays it.
        self._model_uid_to_launch_args[model_uid] = kwargs
        self._model_uid_to_model[model_uid] = object()
        return kwargs

    async def wait_for_load(self, model_uid: str) -> None:
        if not self._loads:
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        await self._update_model_state(model_uid, "ready")

    async def _update_model_state(self, model_uid: str, state: str) -> None:
        self.states[model_uid] = state


install.wrap_worker(Worker)


async def test_a_worker_puts_itself_into_our_configuration() -> None:
    transfer = kv_transfer_config(XavierConfig("m", "0.0.0.0:9999"))
    kept = await Worker().launch_builtin_model("m-rep0", kv_transfer_config=transfer, dtype="auto")
    assert kept["dtype"] == "auto"
    config = config_of(kept)
    assert config.worker_address == "127.0.0.1:70"
    assert config.tracker_address == "10.0.0.1:9999"
    assert config.pool_bytes is not None
    assert kept["envs"] == {SHARES: "1"}
    assert kept["virtual_env_packages"] is None, "what is installed does"
    again = await Worker().launch_builtin_model("m-rep0", **kept | {"envs": {"A": "b"}})
    assert config_of(again).worker_address == "127.0.0.1:70"
    assert again["envs"] == {"A": "b", SHARES: "1"}


@pytest.mark.parametrize(
    ("arguments", "engines"),
    [
        ({"data_parallel_size": 4}, 4),
        ({"data_parallel_size": 8, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": None}, 1),
    ],
)
async def test_the_engines_of_a_replica_divide_its_memory(
    arguments: dict[str, Any], engines: int
) -> None:
    transfer = kv_transfer_config(XavierConfig("m", "0.0.0.0:9999", pool_bytes=1 << 30))
    kept = await Worker().launch_builtin_model("m-rep0", kv_transfer_config=transfer, **arguments)
    assert config_of(kept).pool_bytes == (1 << 30) // engines
    again = await Worker().launch_builtin_model("m-rep0", **kept)
    assert config_of(again).pool_bytes == (1 << 30) // engines


async def test_a_replica_has_the_role_of_its_number() -> None:
    roles = ("prefill", "decode")
    transfer = kv_transfer_config(XavierConfig("m", "0.0.0.0:9999", roles=roles))
    for name, role in {"m-rep0": "prefill", "m-rep1": "decode", "m-rep2": "any"}.items():
        kept = await Worker().launch_builtin_model(name, kv_transfer_config=transfer)
        assert config_of(kept).role == role
        again = await Worker().launch_builtin_model("m-rep1", **kept)  # on another worker
        assert config_of(again).role == "decode"


async def test_a_vllm_that_does_not_share_is_refused_before_anything_is_downloaded() -> None:
    transfer, worker = kv_transfer_config(XavierConfig("m", "0.0.0.0:9999")), Worker()
    with pytest.raises(ConfigError, match="is what the launch asks for, and sharing needs"):
        await worker.launch_builtin_model(
            "m-rep0",
            kv_transfer_config=transfer,
            virtual_env_packages=["vllm==0.27.1"],
            enable_virtual_env=True,
        )
    assert worker._model_uid_to_launch_args == {}


async def test_an_untested_vllm_is_allowed_in_the_engines_processes() -> None:
    config = XavierConfig("m", "0.0.0.0:9999", untested_vllm=True)
    kept = await Worker().launch_builtin_model(
        "m-rep0",
        kv_transfer_config=kv_transfer_config(config),
        virtual_env_packages=["vllm==0.34.0"],
        enable_virtual_env=True,
    )
    assert kept["virtual_env_packages"] == ["vllm==0.34.0"]
    assert kept["envs"] == {SHARES: UNTESTED}


class RacingWorker(Worker):
    """Another replica has just made the link of the model's files."""

    raced = False

    async def launch_builtin_model(self, model_uid: str, **kwargs: Any) -> dict[str, Any]:
        if not self.raced:
            self.raced = True
            raise FileExistsError(17, "File exists", "/models/a", "/cache/m")
        return await Worker.launch_builtin_model(self, model_uid, **kwargs)


install.wrap_worker(RacingWorker)


async def test_a_replica_that_lost_the_race_for_a_link_is_launched_again() -> None:
    worker, transfer = RacingWorker(), kv_transfer_config(XavierConfig("m", "0.0.0.0:9999"))
    kept = await worker.launch_builtin_model("m-rep0", kv_transfer_config=transfer)
    assert config_of(kept).worker_address == "127.0.0.1:70"


async def test_a_worker_leaves_other_launches_alone() -> None:
    other: dict[str, Any] = {"kv_transfer_config": {"kv_connector": "Other"}, "xavier_config": None}
    assert await Worker().launch_builtin_model("m-rep0", **other) == other


async def test_a_failed_load_says_what_the_engine_left_with_the_tracker(address: str) -> None:
    tracker = await xo.create_actor(BlockTracker, "m", address=address, uid=tracker_uid("m"))
    worker = Worker()
    transfer = kv_transfer_config(XavierConfig("m", address))
    await worker.launch_builtin_model("m-rep0", kv_transfer_config=transfer)
    with pytest.raises(RuntimeError, match="See root cause above"):
        await worker.wait_for_load("m-rep0")
    await tracker.report_startup_error("m-rep0", "the pool is too small")
    with pytest.raises(ReplicaStartError, match="the pool is too small"):
        await worker.wait_for_load("m-rep0")


async def test_a_failed_load_without_sharing_is_left_alone() -> None:
    worker = Worker()
    await worker.launch_builtin_model("m-rep0")
    with pytest.raises(RuntimeError, match="See root cause above"):
        await worker.wait_for_load("m-rep0")


async def test_a_replica_is_ready_when_it_can_serve(tracker: Any, address: str) -> None:
    worker, transfer = Worker(loads=True), kv_transfer_config(XavierConfig("m", address))
    await worker.launch_builtin_model("m-rep0", kv_transfer_config=transfer)
    member = Member("a", address, serves=False)
    await tracker.join("namespace", member, 36, INITIAL_SETTINGS, "m-rep0")
    load = asyncio.create_task(worker.wait_for_load("m-rep0"))
    await tracker.was_asked_twice()
    assert worker.states == {}
    await tracker.set_serving("namespace", "a", True)
    await load
    assert worker.states == {"m-rep0": "ready"}


async def test_one_that_is_terminated_before_it_can_is_not_called_ready(
    tracker: Any, address: str
) -> None:
    worker, transfer = Worker(loads=True), kv_transfer_config(XavierConfig("m", address))
    await worker.launch_builtin_model("m-rep0", kv_transfer_config=transfer)
    load = asyncio.create_task(worker.wait_for_load("m-rep0"))
    await tracker.was_asked_twice()
    worker._model_uid_to_model.clear()
    await load
    assert worker.states == {}


@pytest.mark.parametrize("state", ["error", "stopping", "stopped"])
async def test_other_states_are_told_at_once(address: str, state: str) -> None:
    worker, transfer = Worker(), kv_transfer_config(XavierConfig("m", address))
    await worker.launch_builtin_model("m-rep0", kv_transfer_config=transfer)
    await worker._update_model_state("m-rep0", state)
    assert worker.states == {"m-rep0": state}


async def test_without_sharing_a_load_waits_for_nothing() -> None:
    worker = Worker(loads=True)
    await worker.launch_builtin_model("m-rep0")
    await worker.wait_for_load("m-rep0")
    assert worker.states == {"m-rep0": "ready"}

"""A launch with sharing is one transaction around xinference's own.

The supervisor and the worker here are stand-ins with xinference's signatures and the fields that
the wrapper touches; the actor pool and the tracker are real.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.config import SHARES, XavierConfig
from xinference_xavier.errors import ConfigError, NotFoundError, ReplicaStartError
from xinference_xavier.events import Event, LaunchRolledBack
from xinference_xavier.kv_transfer_config import kv_transfer_config
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.serving.launch import install
from xinference_xavier.tracker.actor import BlockTracker


@dataclass
class Device:
    worker_ip: str


@dataclass
class Placement:
    devices: list[Device] = field(default_factory=list)
    role: str = "hybrid"
    model_engine: str | None = None


async def launched_at_once(supervisor: Any, model_uid: str) -> None:
    """Nothing more is to be done."""


def supervisor_class() -> Any:
    class Supervisor:
        """What the wrapper knows of xinference 4.1's SupervisorActor."""

        def __init__(self, address: str, workers: int = 1, local: bool = True) -> None:
            self.address = self.control_address = address
            self._model_uid_to_replica_info: dict[str, Any] = {}
            self._replica_model_uid_to_worker: dict[str, Any] = {}
            self._replica_model_uid_to_worker_shards: dict[str, Any] = {}
            self._xavier_cache_mapping: dict[str, Any] = {}
            self._worker_address_to_worker = dict.fromkeys(map(str, range(workers)))
            self._local = local
            self.calls: list[dict[str, Any]] = []
            self.start: Callable[[Any, str], Awaitable[None]] = launched_at_once

        def is_local_deployment(self) -> bool:
            return self._local

        def _gen_model_uid(self, model_name: str) -> str:
            return f"{model_name}-generated"

        async def _launch_builtin_model(
            self,
            model_uid: str | None,
            model_name: str,
            model_engine: str | None,
            model_type: str | None,
            replica: int = 1,
            n_worker: int | None = 1,
            worker_ip: str | None = None,
            replica_config: list[Placement] | None = None,
            **kwargs: Any,
        ) -> str | None:
            """Launches."""
            self.calls.append({"model_uid": model_uid, "replica": replica, **kwargs})
            uid = model_uid or model_name
            self._model_uid_to_replica_info[uid] = object()
            try:
                await self.start(self, uid)
            except BaseException:
                self._model_uid_to_replica_info.pop(uid, None)
                raise
            return model_uid

        async def cancel_launch_builtin_model(self, model_uid: str) -> None:
            # Workers that count the replica as launched raise RuntimeError, which 4.1 drops.
            self._model_uid_to_replica_info.pop(model_uid, None)

        async def terminate_model(self, model_uid: str, suppress_exception: bool = False) -> None:
            self._model_uid_to_replica_info.pop(model_uid, None)

    install.wrap_supervisor(Supervisor)
    return Supervisor


@pytest.fixture
async def address() -> AsyncIterator[str]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    async with pool:
        yield pool.external_address


@pytest.fixture
def supervisor(address: str) -> Any:
    return supervisor_class()(address)


DEADLINE = 60.0  # of the tests' own waits
ARGUMENTS: dict[str, Any] = {
    "model_uid": "m",
    "model_name": "qwen",
    "model_engine": "vLLM",
    "model_type": "LLM",
    "replica": 2,
    "enable_xavier": "true",
}


async def start(supervisor: Any, **changed: Any) -> Any:
    return await supervisor._launch_builtin_model(**{**ARGUMENTS, **changed})


async def has_tracker(supervisor: Any, model_uid: str = "m") -> bool:
    try:
        await xo.actor_ref(address=supervisor.control_address, uid=tracker_uid(model_uid))
    except xo.ActorNotExist:
        return False
    return True


def config_of(call: dict[str, Any]) -> XavierConfig:
    extra = call["kv_transfer_config"]["kv_connector_extra_config"]
    return XavierConfig.from_dict(extra["xavier"])


async def test_the_tracker_exists_before_the_first_replica(supervisor: Any) -> None:
    seen: list[bool] = []

    async def look(self: Any, model_uid: str) -> None:
        seen.append(await has_tracker(self) and model_uid in self._xavier_cache_mapping)

    supervisor.start = look
    assert await start(supervisor, **{"xavier-pool-bytes": "1GiB", "dtype": "float32"}) == "m"
    assert seen == [True]
    (call,) = supervisor.calls
    assert call.keys() == {"model_uid", "replica", "dtype", "kv_transfer_config"}
    assert config_of(call) == XavierConfig(
        "m", supervisor.control_address, pool_bytes=1 << 30, replicas_per_host=2
    )
    assert await has_tracker(supervisor)


async def test_positional_arguments_work_too(supervisor: Any) -> None:
    await supervisor._launch_builtin_model("m", "qwen", "vllm", None, 2, enable_xavier=True)
    assert config_of(supervisor.calls[0]).model_uid == "m"


async def test_a_missing_uid_is_made_before_the_tracker(supervisor: Any) -> None:
    assert await start(supervisor, model_uid=None) == "qwen-generated"
    assert await has_tracker(supervisor, "qwen-generated")


async def test_without_sharing_nothing_of_ours_happens(supervisor: Any) -> None:
    upstream = {"xavier_config": {"rank": 1}, "kv_transfer_config": {"kv_connector": "Other"}}
    await start(supervisor, enable_xavier="false", model_engine="sglang", n_worker=4, **upstream)
    (call,) = supervisor.calls
    assert call == {"model_uid": "m", "replica": 2, "enable_xavier": False, **upstream}
    assert not await has_tracker(supervisor)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_engine": "SGLang"}, "model_engine='SGLang' cannot share its cache; use vLLM"),
    ({"model_engine": None}, "model_engine=None cannot share"),
    ({"model_type": "embedding"}, "model_type='embedding' has no prefixes"),
    ({"n_worker": 2}, "n_worker=2 spreads one replica over several workers"),
    ({"n_worker": "2"}, "n_worker='2' spreads"),
    ({"kv_transfer_config": {"kv_connector": "Other"}}, "is set by enable_xavier"),
    ({"replica_config": [Placement(role="prefill")]}, "role='prefill' splits prefill"),
    ({"replica_config": [Placement(model_engine="mlx")]}, "model_engine='mlx' cannot share"),
    ({"xavier_cache_bytes": 1}, "built into xinference"),
    ({"xavier_pool_bytes": "4QiB"}, "is not a size"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
async def test_what_cannot_share_is_refused_before_anything_exists(
    supervisor: Any, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await start(supervisor, **wrong)
    assert message in str(caught.value)
    assert supervisor.calls == []
    assert supervisor._xavier_cache_mapping == {}
    assert not await has_tracker(supervisor)


async def test_one_replica_is_allowed_with_a_warning(
    supervisor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await start(supervisor, replica=1)
    assert "nothing is shared until another is added" in caplog.text
    assert await has_tracker(supervisor)


async def test_a_failed_launch_leaves_nothing_and_can_be_repeated(supervisor: Any) -> None:
    async def fail(self: Any, model_uid: str) -> None:
        raise RuntimeError("no memory")

    supervisor.start = fail
    with pytest.raises(RuntimeError, match="no memory"):
        await start(supervisor)
    assert supervisor._xavier_cache_mapping == {}
    assert not await has_tracker(supervisor)
    supervisor.start = launched_at_once
    await start(supervisor)
    assert await has_tracker(supervisor)


async def test_a_tracker_that_xinference_destroyed_first_is_no_second_error(
    supervisor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_and_clean_up(self: Any, model_uid: str) -> None:
        await xo.destroy_actor(self._xavier_cache_mapping.pop(model_uid))
        raise RuntimeError("no memory")

    supervisor.start = fail_and_clean_up
    with pytest.raises(RuntimeError, match="no memory"):
        await start(supervisor)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_cancelled_launch_leaves_nothing(supervisor: Any) -> None:
    begun = asyncio.Event()

    async def hang(self: Any, model_uid: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    supervisor.start = hang
    task = asyncio.create_task(start(supervisor))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert supervisor._xavier_cache_mapping == {}
    assert not await has_tracker(supervisor)


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


@pytest.mark.parametrize(
    ("workers", "local", "changed", "expected"),
    [
        (1, True, {"replica": 3}, 3),
        (2, False, {"replica": 3}, 2),
        (4, False, {"replica": 3}, 1),
        (4, False, {"replica": 3, "worker_ip": "10.0.0.1"}, 3),
        (
            4,
            False,
            {"replica_config": [Placement([Device(worker)]) for worker in "aba"]},
            2,
        ),
    ],
)
async def test_replicas_that_may_share_a_host(
    address: str, workers: int, local: bool, changed: dict[str, Any], expected: int
) -> None:
    supervisor = supervisor_class()(address, workers, local)
    await start(supervisor, **changed)
    assert config_of(supervisor.calls[0]).replicas_per_host == expected


async def test_memory_that_hosts_cannot_share_is_not_demanded(address: str) -> None:
    """As far as the launch knows where replicas will be."""
    spread = [Placement([Device(worker)]) for worker in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
    supervisor = supervisor_class()(address, 2, False)
    with pytest.raises(
        ConfigError, match=r"one host, but replica_config names 10\.0\.0\.1, 10\.0\.0\.2"
    ):
        await start(supervisor, replica_config=spread, xavier_transport="shared_memory")
    assert supervisor.calls == []
    for options in (
        {"replica_config": spread},
        {"replica_config": spread[::2], "xavier_transport": "shared_memory"},
        {"replica": 2, "xavier_transport": "shared_memory"},
    ):
        await start(supervisor, model_uid=f"m{len(supervisor.calls)}", **options)
    assert len(supervisor.calls) == 3
    local = supervisor_class()(address, 1, True)  # where xinference ignores the placement
    await start(local, model_uid="l", replica_config=spread, xavier_transport="shared_memory")


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


class Worker:
    address = "0.0.0.0:70"
    _supervisor_address = "10.0.0.1:9999"

    def __init__(self) -> None:
        self._model_uid_to_launch_args: dict[str, dict[str, Any]] = {}

    async def launch_builtin_model(self, model_uid: str, **kwargs: Any) -> dict[str, Any]:
        # xinference keeps what arrives here and replays it.
        self._model_uid_to_launch_args[model_uid] = kwargs
        return kwargs

    async def wait_for_load(self, model_uid: str) -> None:
        raise RuntimeError("Engine core initialization failed. See root cause above.")


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
    again = await Worker().launch_builtin_model("m-rep0", **kept | {"envs": {"A": "b"}})
    assert config_of(again).worker_address == "127.0.0.1:70"
    assert again["envs"] == {"A": "b", SHARES: "1"}


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


told: queue.Queue[Event] = queue.Queue()
HOOK = f"{__name__}:hook"


def hook(event: Event) -> None:
    told.put(event)


def assert_told(reason: str) -> None:
    """The next event, and the last so far, is a launch rolled back for this reason."""
    event = told.get(timeout=DEADLINE)
    assert isinstance(event, LaunchRolledBack)
    assert (event.model_uid, event.reason) == ("m", reason)
    assert told.empty()


async def test_operators_are_told_once_of_a_launch_that_was_rolled_back(supervisor: Any) -> None:
    async def fail(self: Any, model_uid: str) -> None:
        try:
            raise RuntimeError("out of memory")
        except RuntimeError:
            await self.terminate_model(model_uid, suppress_exception=True)
            raise

    supervisor.start = fail
    with pytest.raises(RuntimeError):
        await start(supervisor, xavier_hooks=HOOK)
    assert_told("out of memory")


async def test_they_are_told_of_one_that_failed_in_the_background(supervisor: Any) -> None:
    background: list[asyncio.Task[None]] = []

    async def fail_later(self: Any, model_uid: str) -> None:
        async def fail() -> None:
            try:
                raise RuntimeError("no such file")
            except RuntimeError:
                await self.terminate_model(model_uid, suppress_exception=True)

        background.append(asyncio.create_task(fail()))

    supervisor.start = fail_later
    await start(supervisor, xavier_hooks=HOOK)
    await background[0]
    assert_told("no such file")


async def test_a_model_that_is_terminated_was_not_rolled_back(supervisor: Any) -> None:
    await start(supervisor, xavier_hooks=HOOK)
    await supervisor.terminate_model("m")
    supervisor.start = no_such_model
    with pytest.raises(RuntimeError):
        await start(supervisor, xavier_hooks=HOOK)
    assert_told("no such model")


async def no_such_model(supervisor: Any, model_uid: str) -> None:
    raise RuntimeError("no such model")


async def test_a_hook_that_cannot_be_imported_is_refused(supervisor: Any) -> None:
    with pytest.raises(ConfigError, match="xavier_hooks='nowhere:hook' cannot be imported"):
        await start(supervisor, xavier_hooks="nowhere:hook")
    assert not supervisor.calls
    assert not await has_tracker(supervisor)


def test_wrapping_twice_changes_nothing_and_the_signature_stays() -> None:
    supervisor = supervisor_class()
    once = supervisor._launch_builtin_model
    install.wrap_supervisor(supervisor)
    assert supervisor._launch_builtin_model is once
    assert "replica_config" in inspect.signature(once).parameters
    assert once.__doc__ == "Launches."


def test_before_4_1_the_outer_method_is_wrapped() -> None:
    class Supervisor:
        async def launch_builtin_model(self, model_uid: str | None, **kwargs: Any) -> str | None:
            return model_uid

        async def terminate_model(self, model_uid: str) -> None: ...

    before = Supervisor.launch_builtin_model
    install.wrap_supervisor(Supervisor)
    assert Supervisor.launch_builtin_model is not before


async def test_models_that_share_are_those_with_a_tracker_of_ours(address: str) -> None:
    """xinference's built-in Xavier keeps its own trackers in the same place."""
    supervisor = supervisor_class()(address)
    for model_uid, uid in (("b", tracker_uid("b")), ("a", tracker_uid("a")), ("c", "another")):
        supervisor._xavier_cache_mapping[model_uid] = await xo.create_actor(
            BlockTracker, model_uid, address=address, uid=uid
        )
    assert await install.xavier_models(supervisor) == ["a", "b"]


def test_install_fits_the_installed_xinference() -> None:
    """In a process of its own, because it changes xinference's classes for good."""
    script = """
import inspect
from xinference.core.supervisor import SupervisorActor
from xinference.core.worker import WorkerActor
from xinference_xavier import extension
from xinference_xavier.serving.launch.install import install

before = inspect.signature(SupervisorActor.launch_builtin_model)
extension()
once = SupervisorActor.__dict__.copy(), WorkerActor.__dict__.copy()
install()
assert once == (SupervisorActor.__dict__.copy(), WorkerActor.__dict__.copy())
assert inspect.signature(SupervisorActor.launch_builtin_model) == before
inner = getattr(SupervisorActor, "_launch_builtin_model", SupervisorActor.launch_builtin_model)
for method in (inner, WorkerActor.launch_builtin_model):
    wrapper = inspect.unwrap(method, stop=lambda f: True)
    assert "serving/launch/" in wrapper.__code__.co_filename
parameters = inspect.signature(inner).parameters
needed = {"model_uid", "model_name", "model_engine", "model_type", "replica", "n_worker",
          "worker_ip", "replica_config", "kwargs"}
assert needed <= parameters.keys(), needed - parameters.keys()
for name in ("xavier_tracker_address", "xavier_models", "xavier_process_info"):
    assert hasattr(SupervisorActor, name), name
assert hasattr(WorkerActor, "xavier_process_info")
for name in ("_gen_model_uid", "is_local_deployment"):
    assert hasattr(SupervisorActor, name), name
print("fits")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.endswith("fits\n"), done.stderr

"""A supervisor and a worker that stand in for xinference's: their signatures, and the fields that
our wrappers touch. The actor pool and the tracker are real."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import xoscar as xo

from xinference_xavier.config import XavierConfig
from xinference_xavier.protocol.tracker import Member, tracker_uid
from xinference_xavier.serving import extension
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


async def removed_at_once(replica: str) -> None:
    """Nothing more is to be done."""


class AskedTracker(BlockTracker):
    """Announces that it was asked for the members of a replica."""

    def __init__(self, model_uid: str) -> None:
        super().__init__(model_uid)
        self.asked = asyncio.Semaphore(0)

    async def members_of(self, replica: str) -> list[Member]:
        members = await super().members_of(replica)
        self.asked.release()
        return members

    async def was_asked_twice(self) -> None:
        """The second of the two questions came after this call."""
        while not self.asked.locked():
            await self.asked.acquire()
        for _ in range(2):
            await self.asked.acquire()


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
            self.remove: Callable[[str], Awaitable[None]] = removed_at_once

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
            request_limits: int | None = None,
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

        async def get_model(self, model_uid: str, **more: Any) -> Any:
            return model_uid, more

        async def terminate_model(self, model_uid: str, suppress_exception: bool = False) -> None:
            self._model_uid_to_replica_info.pop(model_uid, None)

        async def terminate_model_replica(
            self, model_uid: str, replica_id: int, suppress_exception: bool = False
        ) -> int:
            await self.remove(f"{model_uid}-rep{replica_id}")
            active: list[int] = self._model_uid_to_replica_info[model_uid].active_replica_ids
            active.remove(replica_id)
            return len(active)

    extension.wrap_supervisor(Supervisor)
    return Supervisor


class Worker:
    """What our wrappers use of xinference's WorkerActor. A load fails unless it `loads`."""

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


extension.wrap_worker(Worker)


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

"""The worker's part of a launch: options that depend on its host, why an engine failed, and when a
replica is ready."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

from xinference.core.utils import parse_replica_model_uid

from xinference_xavier.errors import ReplicaStartError
from xinference_xavier.kv_transfer_config import configuration, for_worker, own_transfer_config
from xinference_xavier.protocol.startup_errors import pop_startup_error
from xinference_xavier.serving.launch import Method
from xinference_xavier.serving.launch.environment import packages_with_vllm
from xinference_xavier.serving.launch.readiness import wait_until_serving
from xinference_xavier.vllm_versions import SHARES, UNTESTED

logger = logging.getLogger(__name__)


def localizing_launch(original: Method) -> Method:
    @functools.wraps(original)
    async def launch(worker: Any, *args: Any, **kwargs: Any) -> Any:
        transfer = own_transfer_config(kwargs.get("kv_transfer_config"))
        if transfer is not None:
            name = args[0] if args else kwargs["model_uid"]
            kwargs["kv_transfer_config"] = for_worker(
                transfer,
                worker_address=worker.address,
                supervisor_address=worker._supervisor_address,
                number=parse_replica_model_uid(name)[1],
                engines=_engines(kwargs),
            )
            untested = configuration(transfer).untested_vllm
            kwargs["virtual_env_packages"] = packages_with_vllm(kwargs, untested)
            shares = UNTESTED if untested else "1"
            kwargs["envs"] = {**(kwargs.get("envs") or {}), SHARES: shares}
            try:
                return await original(worker, *args, **kwargs)
            except FileExistsError as error:
                # xinference links a model's files. Of replicas that do it at once, one fails.
                logger.info("launched again: replica=%s error=%r", name, error)
        return await original(worker, *args, **kwargs)

    return launch


def _engines(launch: Mapping[str, Any]) -> int:
    """How many engines vLLM starts here for one replica."""
    return int(launch.get("data_parallel_size_local") or launch.get("data_parallel_size") or 1)


def explaining_load(original: Method) -> Method:
    """Wraps WorkerActor.wait_for_load."""

    @functools.wraps(original)
    async def wait_for_load(worker: Any, model_uid: str) -> Any:
        transfer = own_transfer_config(_launch_of(worker, model_uid).get("kv_transfer_config"))
        try:
            return await original(worker, model_uid)
        except Exception as error:
            if transfer is None:
                raise
            # vLLM only says that its engine did not start.
            cause = await pop_startup_error(configuration(transfer), model_uid)
            if cause is None:
                raise
            raise ReplicaStartError(cause) from error

    return wait_for_load


def serving_when_ready(original: Method) -> Method:
    """Wraps WorkerActor._update_model_state, by which xinference tells everybody that an engine has
    loaded and takes requests."""

    @functools.wraps(original)
    async def update(worker: Any, model_uid: str, state: str) -> Any:
        launch = _launch_of(worker, model_uid)
        transfer = own_transfer_config(launch.get("kv_transfer_config"))
        if state == "ready" and transfer is not None:
            model, config = worker._model_uid_to_model.get(model_uid), configuration(transfer)
            await wait_until_serving(worker, model_uid, config, _engines(launch))
            if worker._model_uid_to_model.get(model_uid) is not model:
                return None  # it was terminated meanwhile
        return await original(worker, model_uid, state)

    return update


def _launch_of(worker: Any, model_uid: str) -> Mapping[str, Any]:
    """The arguments with which `worker` launched the replica."""
    return worker._model_uid_to_launch_args.get(model_uid) or {}

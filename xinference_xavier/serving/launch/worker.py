"""The worker's part of a launch: options that depend on its host, why an engine failed, and when a
replica is ready.

An engine is ready before its transfer process, which has to import torch. If requests came then,
each replica would compute what another one has. So a launch waits until its replicas can serve each
other, and have fetched what their peers use most.
"""

import asyncio
import functools
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from xinference_xavier.config import XavierConfig, for_worker, kv_transfer_config, own_config
from xinference_xavier.errors import ReplicaStartError
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.protocol.tracker import Member, tracker_uid
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import UNREACHABLE, ask, within
from xinference_xavier.runtime.backoff import Backoff
from xinference_xavier.serving import seam
from xinference_xavier.serving.launch import Method, is_off
from xinference_xavier.serving.launch.environment import environment, refuse_unresolvable
from xinference_xavier.vllm_versions import SHARES, UNTESTED

logger = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds
_PAUSES = 0.05, 1.0  # seconds, between two questions; a thousand replicas may ask


async def _ask_tracker(config: XavierConfig, method: str, replica: str) -> Any:
    uid = tracker_uid(config.model_uid)
    return await ask(CALL_DEADLINE, config.tracker, uid, method, replica)


async def wait_until_serving(worker: Any, replica: str, config: XavierConfig, engines: int) -> None:
    """Return when peers can fetch from all `engines` of `replica` and these have what they fetch at
    their start, or when its model on `worker` is gone or another one, or after half a minute and
    the time for these fetches."""
    try:
        await within(_PATIENCE + config.warm_join, _until_serving(worker, replica, config, engines))
    except TimeoutError:
        logger.warning(
            "peers cannot fetch from this replica yet; `xinference-xavier doctor` says why: "
            "replica=%s",
            replica,
        )


async def _until_serving(worker: Any, replica: str, config: XavierConfig, engines: int) -> None:
    model = seam.model_on(worker, replica)
    members: list[Member]
    backoff = Backoff(*_PAUSES)
    while seam.model_on(worker, replica) is model:
        try:
            members = await _ask_tracker(config, "members_of", replica)
        except Exception as error:  # whatever it is, the model serves
            logger.debug("cannot ask who serves: replica=%s error=%r", replica, error)
            members = []
        # One that was lost a moment ago may still be among them.
        if len(members) >= engines and all(member.serves for member in members):
            await _until_warm(members, config)
            return
        await asyncio.sleep(backoff.pause())


async def _until_warm(members: list[Member], config: XavierConfig) -> None:
    """Wait for the warm joins, which end in time. Members that do not answer are skipped: they are
    lost, or will take requests."""
    seconds = CALL_DEADLINE + config.warm_join
    waits = (
        ask(seconds, member.address, replica_uid(member.incarnation), "warm_join")
        for member in members
    )
    for outcome in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(outcome, BaseException):
            logger.debug("cannot wait for a warm join: error=%r", outcome)


def localizing_launch(original: Method) -> Method:
    @functools.wraps(original)
    async def launch(worker: Any, *args: Any, **kwargs: Any) -> Any:
        config = own_config(kwargs.get("kv_transfer_config"))
        if config is not None:
            name = args[0] if args else kwargs["model_uid"]
            found = environment(kwargs, config.untested_vllm)
            await refuse_unresolvable(kwargs, found)
            local = for_worker(
                config,
                worker_address=worker.address,
                supervisor_address=seam.supervisor_address(worker),
                number=seam.replica_number(name),
                engines=_engines(kwargs),
                # A launch that is replayed names what has replaced the pin.
                replaced_vllm=found.replaced or config.replaced_vllm,
            )
            kwargs["kv_transfer_config"] = kv_transfer_config(local)
            kwargs["virtual_env_packages"] = found.packages
            shares = UNTESTED if local.untested_vllm else "1"
            kwargs["envs"] = {**(kwargs.get("envs") or {}), SHARES: shares}
            try:
                return await original(worker, *args, **kwargs)
            except FileExistsError as error:
                # Replicas made the same link at once: docs/upstream/xinference-link-race.patch.
                logger.info("launched again: replica=%s error=%r", name, error)
        return await original(worker, *args, **kwargs)

    return launch


def refusing_replica(original: Method) -> Method:
    """Wraps WorkerActor.launch_builtin_model where this extension is off."""

    @functools.wraps(original)
    async def launch(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if own_config(kwargs.get("kv_transfer_config")) is not None:
            raise is_off()
        return await original(worker, *args, **kwargs)

    return launch


def _engines(launch: Mapping[str, Any]) -> int:
    """How many engines vLLM starts here for one replica."""
    return int(launch.get("data_parallel_size_local") or launch.get("data_parallel_size") or 1)


def explaining_load(original: Method) -> Method:
    """Wraps WorkerActor.wait_for_load."""

    @functools.wraps(original)
    async def wait_for_load(worker: Any, model_uid: str, *args: Any, **kwargs: Any) -> Any:
        config = own_config(seam.launch_of(worker, model_uid).get("kv_transfer_config"))
        try:
            return await original(worker, model_uid, *args, **kwargs)
        except Exception as error:
            if config is None:
                raise
            # vLLM only says that its engine did not start.
            cause: str | None = None
            with suppress(*UNREACHABLE):
                cause = await _ask_tracker(config, "pop_startup_error", model_uid)
            if cause is None:
                raise
            raise ReplicaStartError(cause) from error

    return wait_for_load


def serving_when_ready(original: Method) -> Method:
    """Wraps WorkerActor._update_model_state, by which xinference tells everybody that an engine has
    loaded and takes requests."""

    @functools.wraps(original)
    async def update(worker: Any, model_uid: str, state: str, *args: Any, **kwargs: Any) -> Any:
        launch = seam.launch_of(worker, model_uid)
        config = own_config(launch.get("kv_transfer_config"))
        if state == "ready" and config is not None:
            model = seam.model_on(worker, model_uid)
            await wait_until_serving(worker, model_uid, config, _engines(launch))
            if seam.model_on(worker, model_uid) is not model:
                return None  # it was terminated meanwhile
        return await original(worker, model_uid, state, *args, **kwargs)

    return update

"""Puts sharing into xinference's launch, by wrapping some methods and adding others.

Runs in the processes that hold a supervisor or a worker actor, on their event loop. A launch with
``enable_xavier`` is one transaction: its tracker exists before the first replica does, and is
gone again if the launch fails. Once the launch has begun in the background (``wait_ready=False``)
xinference itself cleans up: it destroys what is in its ``_xavier_cache_mapping`` when
the launch fails, when the model is terminated and when the last replica is gone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import xoscar as xo

from xinference_xavier.cancels import mend_cancels
from xinference_xavier.config import ENABLE, SHARES, take_launch_options
from xinference_xavier.errors import (
    ConfigError,
    LaunchCancelledError,
    NotFoundError,
    ReplicaStartError,
)
from xinference_xavier.hooks import Hooks, LaunchRolledBack, load_hook
from xinference_xavier.rollback import Rollback
from xinference_xavier.serving.cancellation import release_uid, thorough_cancel
from xinference_xavier.serving.cluster import supervisor_facts, worker_facts
from xinference_xavier.serving.transfer_config import (
    configuration,
    kv_transfer_config,
    localized,
    own_transfer_config,
)
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.failure import failure_of
from xinference_xavier.tracker.protocol import tracker_uid

logger = logging.getLogger(__name__)

_WRAPPED = "_xavier_wrapped"
_ENGINE = "vllm"

_Method = Callable[..., Awaitable[Any]]

# Of the models launched through this process, by control address and uid.
_hooks: dict[tuple[str, str], Hooks] = {}


def install() -> None:
    """Wrap xinference's supervisor and worker in this process, and mend the pool they are in; a
    second call changes nothing.

    Imports them here: the extension is loaded by these modules themselves, and only by them.
    """
    from xinference.core.supervisor import SupervisorActor
    from xinference.core.worker import WorkerActor

    mend_cancels()
    wrap_supervisor(SupervisorActor)
    wrap_worker(WorkerActor)


def wrap_supervisor(supervisor: type[Any]) -> None:
    # 4.1 has an inner method that REST, versioned launch and autostart share; 4.0 only the outer.
    inner = "_launch_builtin_model"
    name = inner if hasattr(supervisor, inner) else "launch_builtin_model"
    _wrap_once(supervisor, name, _sharing_launch)
    _wrap_once(supervisor, "terminate_model", _telling_terminate)
    if hasattr(supervisor, "cancel_launch_builtin_model"):  # from 4.1 on
        _wrap_once(supervisor, "cancel_launch_builtin_model", thorough_cancel)
    supervisor.xavier_tracker_address = xavier_tracker_address
    supervisor.xavier_models = xavier_models
    supervisor.xavier_facts = supervisor_facts


def wrap_worker(worker: type[Any]) -> None:
    _wrap_once(worker, "launch_builtin_model", _localizing_launch)
    _wrap_once(worker, "wait_for_load", _explaining_load)
    worker.xavier_facts = worker_facts


async def xavier_tracker_address(
    supervisor: Any, model_uid: str, create: bool = False, hooks: str | None = None
) -> str:
    """Address of the pool that holds the model's tracker; becomes a SupervisorActor's method.

    With ``create``, which only replicas pass, a running model's missing tracker is made, with
    their ``hooks``: a new supervisor begins with none. Two replicas that ask at once get the same
    one. The host may be a wildcard: the caller knows where it reached the supervisor. Raises
    NotFoundError.
    """
    address = _control_address(supervisor)
    if not create:
        try:
            await xo.actor_ref(address=address, uid=tracker_uid(model_uid))
        except xo.ActorNotExist:
            raise NotFoundError(model_uid, "does not share its cache here") from None
        return address

    running = supervisor._model_uid_to_replica_info
    if model_uid not in running:
        raise NotFoundError(model_uid, "is not running here")
    tracker = await _ensure_tracker(address, model_uid, hooks)
    if model_uid not in running:
        await _destroy_tracker(address, model_uid)
        raise NotFoundError(model_uid, "was terminated meanwhile")
    # Here xinference finds it when the model ends.
    supervisor._xavier_cache_mapping.setdefault(model_uid, tracker)
    return address


async def xavier_models(supervisor: Any) -> list[str]:
    """The uids of all models that share; becomes a SupervisorActor's method too."""
    trackers = supervisor._xavier_cache_mapping
    # The built-in Xavier keeps its own there.
    return sorted(uid for uid, ref in trackers.items() if ref.uid == tracker_uid(uid).encode())


def _wrap_once(owner: type[Any], name: str, wrap: Callable[[_Method], _Method]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _WRAPPED):
        wrapped = wrap(original)
        setattr(wrapped, _WRAPPED, True)
        setattr(owner, name, wrapped)


def _sharing_launch(original: _Method) -> _Method:
    signature = inspect.signature(original)
    launching: set[tuple[str, str]] = set()

    @functools.wraps(original)
    async def launch(supervisor: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(supervisor, *args, **kwargs)
        call.apply_defaults()
        extra = call.arguments["kwargs"] = dict(call.arguments["kwargs"])
        options = take_launch_options(extra)
        if not options.enabled:
            return await original(*call.args, **call.kwargs)

        _refuse_what_cannot_share(call.arguments, extra)
        if options.values.get("transport") == "shared_memory":
            _refuse_several_hosts(supervisor, call.arguments)
        model_uid = call.arguments["model_uid"]
        if model_uid is None:
            model_uid = supervisor._gen_model_uid(call.arguments["model_name"])
            call.arguments["model_uid"] = model_uid
        address = _control_address(supervisor)
        # No await between check and claim: a second launch must not touch this one's tracker.
        claim = (address, model_uid)
        if claim in launching or model_uid in supervisor._model_uid_to_replica_info:
            raise ConfigError(
                "model_uid",
                model_uid,
                "is taken by a model that is running or being launched",
                "choose another, or terminate that model first",
            )
        launching.add(claim)
        release_uid(supervisor, model_uid)  # a replica may have begun to load after the cancel
        try:
            hooks = None if options.hooks is None else Hooks(load_hook(options.hooks))
            config = options.config(
                model_uid=model_uid,
                tracker_address=address,
                replicas_per_host=_replicas_per_host(supervisor, call.arguments),
            )
            extra["kv_transfer_config"] = kv_transfer_config(config)
            if hooks is not None:
                _hooks[claim] = hooks
            async with Rollback() as scope:
                # Registered first, because a cancelled creation may still come about.
                scope.undo(_destroy_tracker, address, model_uid)
                tracker = await _ensure_tracker(address, model_uid, config.hooks)
                trackers = supervisor._xavier_cache_mapping
                trackers[model_uid] = tracker
                scope.undo(_forget, trackers, model_uid, tracker)
                result = await original(*call.args, **call.kwargs)
                if model_uid not in supervisor._model_uid_to_replica_info:
                    raise LaunchCancelledError(model_uid)
                scope.commit()
            return result
        except BaseException as error:
            _tell_rolled_back(claim, error)
            raise
        finally:
            launching.discard(claim)

    return launch


def _telling_terminate(original: _Method) -> _Method:
    @functools.wraps(original)
    async def terminate(supervisor: Any, model_uid: str, *args: Any, **kwargs: Any) -> Any:
        # xinference undoes a failed launch, also one in the background, in its error's handler.
        error = sys.exc_info()[1]
        claim = (_control_address(supervisor), model_uid)
        try:
            return await original(supervisor, model_uid, *args, **kwargs)
        finally:
            if error is not None:
                _tell_rolled_back(claim, error)
            _hooks.pop(claim, None)

    return terminate


def _tell_rolled_back(claim: tuple[str, str], error: BaseException) -> None:
    """Once: whoever is first knows best."""
    hooks = _hooks.pop(claim, None)
    if hooks is not None:
        reason = str(error) or type(error).__name__
        hooks.tell(LaunchRolledBack(model_uid=claim[1], reason=reason))


def _localizing_launch(original: _Method) -> _Method:
    @functools.wraps(original)
    async def launch(worker: Any, *args: Any, **kwargs: Any) -> Any:
        transfer = own_transfer_config(kwargs.get("kv_transfer_config"))
        if transfer is not None:
            kwargs["kv_transfer_config"] = localized(
                transfer,
                worker_address=worker.address,
                supervisor_address=worker._supervisor_address,
            )
            kwargs["envs"] = {**(kwargs.get("envs") or {}), SHARES: "1"}
        return await original(worker, *args, **kwargs)

    return launch


def _explaining_load(original: _Method) -> _Method:
    @functools.wraps(original)
    async def wait_for_load(worker: Any, model_uid: str) -> Any:
        arguments = worker._model_uid_to_launch_args.get(model_uid) or {}
        transfer = own_transfer_config(arguments.get("kv_transfer_config"))
        try:
            return await original(worker, model_uid)
        except Exception as error:
            if transfer is None:
                raise
            # All that vLLM says is that its engine did not start.
            cause = await failure_of(configuration(transfer), model_uid)
            if cause is None:
                raise
            raise ReplicaStartError(cause) from error

    return wait_for_load


def _refuse_what_cannot_share(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for what no engine could ever make work, and warns of what is idle."""
    without = f"launch without {ENABLE}=true"
    placements = arguments.get("replica_config") or ()
    engines = [arguments.get("model_engine")]
    engines += [item.model_engine for item in placements if item.model_engine is not None]
    for engine in engines:
        if str(engine).lower() != _ENGINE:
            raise ConfigError(
                "model_engine", engine, "cannot share its cache", f"use vLLM, or {without}"
            )
    model_type = arguments.get("model_type")
    if str(model_type or "LLM").lower() != "llm":
        raise ConfigError("model_type", model_type, "has no prefixes to share", without)
    n_worker = arguments.get("n_worker")
    if str(1 if n_worker is None else n_worker) != "1":
        raise ConfigError(
            "n_worker",
            n_worker,
            "spreads one replica over several workers, which sharing does not support",
            f"use n_worker=1, or {without}",
        )
    for item in placements:
        if item.role != "hybrid":
            raise ConfigError(
                "role", item.role, "splits prefill from decoding, which sharing excludes", without
            )
    if extra.get("kv_transfer_config") is not None:
        raise ConfigError(
            "kv_transfer_config",
            extra["kv_transfer_config"],
            f"is what {ENABLE} sets itself",
            f"leave it out, or {without}",
        )
    if arguments.get("replica") == 1:
        logger.warning("%s with one replica: nothing to share until one is added", ENABLE)


def _refuse_several_hosts(supervisor: Any, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for replicas that are placed where they can never share their memory.

    Where xinference places them itself, their fetches will tell.
    """
    placements = arguments.get("replica_config") or ()
    hosts = {device.worker_ip for item in placements for device in item.devices}
    if len(hosts) > 1 and not supervisor.is_local_deployment():
        raise ConfigError(
            "xavier_transport",
            "shared_memory",
            f"demands one host, and replica_config names {', '.join(sorted(map(str, hosts)))}",
            "place all replicas on one host, or use auto",
        )


def _replicas_per_host(supervisor: Any, arguments: Mapping[str, Any]) -> int:
    """How many replicas of this launch one worker may have to house."""
    placements = arguments.get("replica_config") or ()
    if placements:
        hosts = Counter(device.worker_ip for item in placements for device in item.devices)
        return max(hosts.values(), default=1)
    replica = arguments.get("replica")
    if not isinstance(replica, int):
        return 1
    if arguments.get("worker_ip") is not None or supervisor.is_local_deployment():
        return max(1, replica)
    workers = max(1, len(supervisor._worker_address_to_worker))
    return max(1, -(-replica // workers))


def _control_address(supervisor: Any) -> str:
    # 4.0 has no address apart from the actor's own.
    address: str = getattr(supervisor, "control_address", supervisor.address)
    return address


async def _ensure_tracker(address: str, model_uid: str, hooks: str | None) -> Any:
    uid = tracker_uid(model_uid)
    try:
        return await xo.create_actor(BlockTracker, model_uid, hooks=hooks, address=address, uid=uid)
    except xo.ActorAlreadyExist:
        return await xo.actor_ref(address=address, uid=uid)


async def _destroy_tracker(address: str, model_uid: str) -> None:
    try:
        tracker = await xo.actor_ref(address=address, uid=tracker_uid(model_uid))
        await xo.destroy_actor(tracker)
    except xo.ActorNotExist:
        # xinference was there first: it cleans up after a launch that failed.
        logger.debug("tracker of %s is gone already", model_uid)


def _forget(trackers: dict[str, Any], model_uid: str, tracker: Any) -> None:
    if trackers.get(model_uid) is tracker:
        del trackers[model_uid]

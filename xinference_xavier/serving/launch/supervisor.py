"""The supervisor's part of a launch: refusals, the model's tracker, cancels, and finding a replica.

What could never share is refused before anything is created. Creating the tracker is a transaction:
it destroys the tracker if the launch fails. A launch in the background (`wait_ready=False`) is
cleaned up by xinference, which destroys the actors in `seam.trackers`.

Cancels: xinference 4.1 stops the replicas that its workers count as being launched. A vLLM engine
loads on a thread of its own, and after one second its worker counts the replica as launched. The
cancel then ignores it, and the launch succeeds with replicas that no list shows and whose uid stays
taken. So they are terminated here. The model is no longer listed, which tells the launch wrapper
that it was cancelled. xinference also keeps the replicas' workers on record, which blocks the uid.
"""

import asyncio
import functools
import inspect
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import xoscar as xo

from xinference_xavier.config import (
    ENABLE,
    WITHOUT_US,
    XavierConfig,
    kv_transfer_config,
    take_launch_options,
    why_foreign,
)
from xinference_xavier.errors import (
    ConfigError,
    LaunchCancelledError,
    NotFoundError,
    ReplicaNotServingError,
)
from xinference_xavier.events import load_hook
from xinference_xavier.options import MAX_REPLICAS
from xinference_xavier.protocol.tracker import tracker_uid, without_rank
from xinference_xavier.runtime.aio import Rollback, spawn
from xinference_xavier.serving import seam
from xinference_xavier.serving.launch import Method, is_off, own_trackers
from xinference_xavier.serving.launch.drain import passes_over
from xinference_xavier.stats.answers import is_part_of_path
from xinference_xavier.tracker.actor import BlockTracker

logger = logging.getLogger(__name__)


FOLDER = "xavier"
"""Our folder in xinference's data folder."""


def refuse_unshareable(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for a launch that cannot share; warns of a single replica."""
    model_uid = arguments["model_uid"]
    if model_uid and not is_part_of_path(model_uid):
        raise ConfigError(
            "model_uid",
            model_uid,
            "has a slash or only dots, so that no route finds the model",
            f"choose another, or {WITHOUT_US}",
        )
    n_worker = arguments.get("n_worker")
    if str(1 if n_worker is None else n_worker) != "1":
        raise ConfigError(
            "n_worker",
            n_worker,
            "spreads one replica over several workers, which sharing does not support",
            f"use n_worker=1, or {WITHOUT_US}",
        )
    if extra.get("kv_transfer_config") is not None:
        raise ConfigError(
            "kv_transfer_config",
            extra["kv_transfer_config"],
            f"is set by {ENABLE}",
            f"leave it out, or {WITHOUT_US}",
        )
    if arguments.get("replica") == 1:
        logger.warning("%s with one replica: nothing is shared until another is added", ENABLE)


def refuse_roles_without_replicas(arguments: Mapping[str, Any], roles: Sequence[str]) -> None:
    """Raises ConfigError if there are more `roles` than replicas."""
    replica = arguments.get("replica")
    count = replica if isinstance(replica, int) else 1
    if len(roles) > count:
        raise ConfigError(
            "xavier_roles",
            ",".join(roles),
            f"has {len(roles)} replicas, but {count} {'is' if count == 1 else 'are'} launched",
            f"launch with replica={len(roles)}, or give fewer roles",
        )


def refuse_several_hosts(supervisor: Any, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if `replica_config` places replicas on hosts that cannot share memory. If
    xinference places the replicas itself, only their fetches show where they are."""
    placements = arguments.get("replica_config") or ()
    hosts = {device.worker_ip for item in placements for device in item.devices}
    if len(hosts) > 1 and not supervisor.is_local_deployment():
        raise ConfigError(
            "xavier_transport",
            "shared_memory",
            f"needs one host, but replica_config names {', '.join(sorted(map(str, hosts)))}",
            "place all replicas on one host, or use auto",
        )


_PATIENCE = 30.0
"""Seconds that a cancel waits for replicas to end. A loading engine ends when it has loaded."""


def thorough_cancel(original: Method) -> Method:
    """Wraps SupervisorActor.cancel_launch_builtin_model, for models with our tracker only."""

    @functools.wraps(original)
    async def cancel(supervisor: Any, model_uid: str, *args: Any, **kwargs: Any) -> Any:
        tracker = own_trackers(supervisor).get(model_uid)
        info = seam.replica_infos(supervisor).get(model_uid)
        result = await original(supervisor, model_uid, *args, **kwargs)
        if tracker is not None and info is not None:
            endings = [
                worker.terminate_model(model_uid=replica)
                for replica, worker in seam.replicas_of(model_uid, info)
            ]
            # A launch in the background no longer finds the model, and so does not clean up.
            if seam.trackers(supervisor).pop(model_uid, None) is not None:
                endings.append(xo.destroy_actor(tracker))
            if endings:
                # Replicas that take longer than this go on ending in the background.
                await asyncio.wait([spawn(_end(each)) for each in endings], timeout=_PATIENCE)
            release_uid(supervisor, model_uid)
        return result

    return cancel


def release_uid(supervisor: Any, model_uid: str) -> None:
    """Remove what a cancelled launch left on record, so that the uid can be launched again."""
    replica_uid = re.compile(re.escape(model_uid) + r"-rep\d+")
    for book in seam.replica_records(supervisor):
        for uid in list(filter(replica_uid.fullmatch, book)):
            del book[uid]


async def _end(ending: Awaitable[Any]) -> None:
    """Log a failure instead of raising, so that the others end too. It may be gone already, its
    worker may be lost, or xinference's own cancel may be unwinding its launch."""
    try:
        await ending
    except Exception as error:
        logger.warning("cleanup after a cancelled launch is incomplete: error=%r", error)


async def xavier_tracker_address(
    supervisor: Any, model_uid: str, create: bool = False, hooks: str | None = None
) -> str:
    """Address of the actor pool with the model's tracker; becomes a SupervisorActor's method.

    The host may be a wildcard: the caller knows at which address it reached the supervisor. Only
    replicas pass `create`, which creates a running model's missing tracker with their `hooks`,
    because a new supervisor has none. Replicas that ask at the same time get the same tracker.

    Raises:
        NotFoundError: the model does not run or does not share here.
    """
    address = seam.control_address(supervisor)
    if not create:
        try:
            await xo.actor_ref(address=address, uid=tracker_uid(model_uid))
        except xo.ActorNotExist:
            raise NotFoundError(f"model {model_uid!r} does not share its cache here") from None
        return address

    running = seam.replica_infos(supervisor)
    if model_uid not in running:
        raise NotFoundError(f"model {model_uid!r} is not running here")
    tracker = await _ensure_tracker(address, model_uid, hooks)
    if model_uid not in running:
        await _destroy_tracker(address, model_uid)
        raise NotFoundError(f"model {model_uid!r} was terminated meanwhile")
    # xinference destroys it from there when the model ends.
    seam.trackers(supervisor).setdefault(model_uid, tracker)
    return address


async def xavier_models(supervisor: Any) -> dict[str, dict[str, str]]:
    """All models that share, each with the addresses of its replicas' workers; becomes a
    SupervisorActor's method."""
    uids = sorted(own_trackers(supervisor))
    return {uid: seam.worker_addresses(supervisor, uid) for uid in uids}


def refusing_launch(original: Method) -> Method:
    """Wraps the method that every launch passes, of a supervisor where this extension is off.
    xinference passes all arguments by their names."""

    @functools.wraps(original)
    async def launch(supervisor: Any, *args: Any, **kwargs: Any) -> Any:
        reason = why_foreign(kwargs)
        if take_launch_options(kwargs, foreign=reason is not None) is not None:
            raise reason or is_off()
        return await original(supervisor, *args, **kwargs)

    return launch


def sharing_launch(original: Method) -> Method:
    signature = inspect.signature(original)
    launching: set[tuple[str, str]] = set()

    @functools.wraps(original)
    async def launch(supervisor: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(supervisor, *args, **kwargs)
        call.apply_defaults()
        extra = call.arguments["kwargs"] = dict(call.arguments["kwargs"])
        reason = why_foreign(call.arguments)
        options = take_launch_options(extra, foreign=reason is not None)
        if options is None:
            return await original(*call.args, **call.kwargs)
        if reason is not None:
            raise reason
        refuse_unshareable(call.arguments, extra)
        refuse_roles_without_replicas(call.arguments, options.roles or ())
        if options.transport == "shared_memory":
            refuse_several_hosts(supervisor, call.arguments)
        model_uid = call.arguments["model_uid"]
        if model_uid is None:
            model_uid = seam.new_model_uid(supervisor, call.arguments["model_name"])
            call.arguments["model_uid"] = model_uid
        address = seam.control_address(supervisor)
        # No await between check and claim, so that two launches never share a tracker.
        claim = (address, model_uid)
        if claim in launching or model_uid in seam.replica_infos(supervisor):
            raise ConfigError(
                "model_uid",
                model_uid,
                "is taken by a model that is running or being launched",
                "choose another, or terminate that model first",
            )
        launching.add(claim)
        release_uid(supervisor, model_uid)  # a replica may have begun to load after the cancel
        try:
            config = XavierConfig(
                model_uid,
                address,
                replicas_per_host=_replicas_per_host(supervisor, call.arguments),
                request_limit=_request_limit(call.arguments),
                **vars(options),
            )
            extra["kv_transfer_config"] = kv_transfer_config(config)
            if config.hooks is not None:
                load_hook(config.hooks)
            async with Rollback() as scope:
                # Registered first, because a cancelled creation may still succeed.
                scope.undo(_destroy_tracker, address, model_uid)
                tracker = await _ensure_tracker(address, model_uid, config.hooks)
                trackers = seam.trackers(supervisor)
                trackers[model_uid] = tracker
                scope.undo(_forget, trackers, model_uid, tracker)
                result = await original(*call.args, **call.kwargs)
                if model_uid not in seam.replica_infos(supervisor):
                    raise LaunchCancelledError(f"the launch of model {model_uid!r} was cancelled")
                scope.commit()
            return result
        finally:
            launching.discard(claim)

    return launch


def _replicas_per_host(supervisor: Any, arguments: Mapping[str, Any]) -> int:
    """The most replicas of this launch that one worker may get."""
    placements = arguments.get("replica_config") or ()
    if placements:
        per_host = Counter(device.worker_ip for item in placements for device in item.devices)
        return max(per_host.values(), default=1)
    replica = arguments.get("replica")
    if not isinstance(replica, int):
        return 1
    one_host = arguments.get("worker_ip") is not None or supervisor.is_local_deployment()
    hosts = 1 if one_host else max(1, len(seam.workers(supervisor)))
    return max(1, -(-replica // hosts))


def _request_limit(arguments: Mapping[str, Any]) -> int | None:
    limit = arguments.get("request_limits")
    return limit if type(limit) is int and limit > 0 else None


async def _ensure_tracker(address: str, model_uid: str, hooks: str | None) -> Any:
    uid = tracker_uid(model_uid)
    try:
        return await xo.create_actor(
            BlockTracker,
            model_uid,
            hooks=hooks,
            home=seam.data_folder() / FOLDER,
            address=address,
            uid=uid,
        )
    except xo.ActorAlreadyExist:
        return await xo.actor_ref(address=address, uid=uid)


async def _destroy_tracker(address: str, model_uid: str) -> None:
    try:
        tracker = await xo.actor_ref(address=address, uid=tracker_uid(model_uid))
        await xo.destroy_actor(tracker)
    except xo.ActorNotExist:
        # xinference has already cleaned up after the failed launch.
        logger.debug("tracker already destroyed: model=%s", model_uid)


def _forget(trackers: dict[str, Any], model_uid: str, tracker: Any) -> None:
    if trackers.get(model_uid) is tracker:
        del trackers[model_uid]


async def xavier_replica(supervisor: Any, replica: str) -> Any:
    """A reference to the model actor of one replica. Raises ReplicaNotServingError."""
    replica = without_rank(replica)
    try:
        return await seam.worker_of(supervisor, replica).get_model(model_uid=replica)
    except Exception as error:
        raise ReplicaNotServingError(f"replica {replica} takes no requests ({error!r})") from error


def finding_replicas(get_model: Method) -> Method:
    """Makes `get_model(replica, xavier_replica=True)` do what `xavier_replica` does. While
    xinference 4.1 relaunches its supervisor, it lets only some methods of its own through.

    Round-robin requests pass over replicas that drain, if there are others.
    """

    @functools.wraps(get_model)
    async def find(supervisor: Any, model_uid: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("xavier_replica", False):
            return await xavier_replica(supervisor, model_uid)
        model = await get_model(supervisor, model_uid, *args, **kwargs)
        turns = 0
        while turns < MAX_REPLICAS and passes_over(supervisor, model_uid, model):
            model = await get_model(supervisor, model_uid, *args, **kwargs)
            turns += 1  # perhaps no other one is ready
        return model

    return find

"""Cancelling a launch whose engines are loading already.

xinference 4.1 stops what its workers count as being launched. A vLLM engine loads on a thread of
its own, and after one second its worker counts the replica as launched: the cancel leaves it be,
and the launch ends well, with replicas that no list shows and that keep their uid taken. So those
are terminated here, and the launch wrapper looks whether its model was cancelled meanwhile.

Runs on the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import xoscar as xo

from xinference_xavier.tracker.actor import tracker_uid

logger = logging.getLogger(__name__)

_Method = Callable[..., Awaitable[Any]]
_cancelled: set[tuple[str, str]] = set()


def thorough_cancel(original: _Method) -> _Method:
    """Wraps SupervisorActor.cancel_launch_builtin_model, for models of ours alone."""

    @functools.wraps(original)
    async def cancel(supervisor: Any, model_uid: str) -> Any:
        tracker = supervisor._xavier_cache_mapping.get(model_uid)
        ours = tracker is not None and _uid(tracker) == tracker_uid(model_uid)
        info = supervisor._model_uid_to_replica_info.get(model_uid)
        result = await original(supervisor, model_uid)
        if ours and info is not None:
            _cancelled.add((tracker.address, model_uid))
            await asyncio.gather(
                *(
                    _terminate(worker, f"{model_uid}-rep{replica_id}")
                    for replica_id in info.active_replica_ids
                    for worker in info.replica_to_worker_refs[replica_id]
                )
            )
            # A launch in the background finds no model to clean up after any more.
            await _destroy(supervisor._xavier_cache_mapping.pop(model_uid, None))
        return result

    return cancel


def was_cancelled(claim: tuple[str, str]) -> bool:
    """Whether the launch with this control address and model uid was; forgets it."""
    cancelled = claim in _cancelled
    _cancelled.discard(claim)
    return cancelled


async def _terminate(worker: Any, replica: str) -> None:
    try:
        await worker.terminate_model(model_uid=replica)
    except ValueError:
        # Its launch is still unwinding: xinference's own cancel was in time for this one.
        logger.debug("%s ends by itself", replica)


async def _destroy(tracker: Any) -> None:
    if tracker is not None:
        with contextlib.suppress(xo.ActorNotExist):
            await xo.destroy_actor(tracker)


def _uid(ref: Any) -> str:
    uid = ref.uid
    return uid.decode() if isinstance(uid, bytes) else str(uid)

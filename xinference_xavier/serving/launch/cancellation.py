"""Cancelling a launch whose engines are loading already.

xinference 4.1 stops what its workers count as being launched. A vLLM engine loads on a thread of
its own, and after one second its worker counts the replica as launched: the cancel leaves it be,
and the launch ends well, with replicas that no list shows and that keep their uid taken. So those
are terminated here; that the model is listed no more tells the launch wrapper what became of it.
Nor does xinference forget which worker has them, and takes that for a uid in use.

Runs on the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Awaitable, Iterable
from typing import Any

import xoscar as xo

from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.tasks import spawn
from xinference_xavier.serving.launch import Method

logger = logging.getLogger(__name__)

_PATIENCE = 30.0
"""Seconds that a cancel waits for replicas to end. An engine that loads ends when it has loaded."""


def thorough_cancel(original: Method) -> Method:
    """Wraps SupervisorActor.cancel_launch_builtin_model, for models of ours alone."""

    @functools.wraps(original)
    async def cancel(supervisor: Any, model_uid: str) -> Any:
        tracker = supervisor._xavier_cache_mapping.get(model_uid)
        ours = tracker is not None and _uid(tracker) == tracker_uid(model_uid)
        info = supervisor._model_uid_to_replica_info.get(model_uid)
        result = await original(supervisor, model_uid)
        if ours and info is not None:
            endings = [
                worker.terminate_model(model_uid=f"{model_uid}-rep{replica_id}")
                for replica_id in info.active_replica_ids
                for worker in info.replica_to_worker_refs[replica_id]
            ]
            # A launch in the background finds no model to clean up after any more.
            if supervisor._xavier_cache_mapping.pop(model_uid, None) is not None:
                endings.append(xo.destroy_actor(tracker))
            await _end_all(endings)
            release_uid(supervisor, model_uid)
        return result

    return cancel


def release_uid(supervisor: Any, model_uid: str) -> None:
    """Let a model that is not listed be launched again, whatever a cancelled launch left behind."""
    replica_uid = re.compile(re.escape(model_uid) + r"-rep\d+")
    for book in (
        supervisor._replica_model_uid_to_worker,
        supervisor._replica_model_uid_to_worker_shards,
    ):
        for uid in list(filter(replica_uid.fullmatch, book)):
            del book[uid]


async def _end_all(endings: Iterable[Awaitable[Any]]) -> None:
    """What takes longer than the patience goes on by itself."""
    tasks = [spawn(_end(ending)) for ending in endings]
    if tasks:
        await asyncio.wait(tasks, timeout=_PATIENCE)


async def _end(ending: Awaitable[Any]) -> None:
    """One that fails keeps no other from ending: what is gone already, a lost worker, or a replica
    whose launch still unwinds, because xinference's own cancel was in time for it."""
    try:
        await ending
    except Exception as error:
        logger.warning("a cancelled launch was not cleaned up everywhere: %r", error)


def _uid(ref: Any) -> str:
    uid = ref.uid
    return uid.decode() if isinstance(uid, bytes) else str(uid)

"""Cancels launches whose engines are already loading.

xinference 4.1 stops the replicas that its workers count as being launched. A vLLM engine loads on a
thread of its own, and after one second its worker counts the replica as launched. The cancel then
ignores it, and the launch succeeds with replicas that no list shows and whose uid stays taken. So
they are terminated here. The model is no longer listed, which tells the launch wrapper that it was
cancelled. xinference also keeps the replicas' workers on record, which blocks the uid.
"""

import asyncio
import functools
import logging
import re
from collections.abc import Awaitable
from typing import Any

import xoscar as xo

from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.tasks import spawn
from xinference_xavier.serving.launch import Method

logger = logging.getLogger(__name__)

_PATIENCE = 30.0
"""Seconds that a cancel waits for replicas to end. A loading engine ends when it has loaded."""


def thorough_cancel(original: Method) -> Method:
    """Wraps SupervisorActor.cancel_launch_builtin_model, for models with our tracker only."""

    @functools.wraps(original)
    async def cancel(supervisor: Any, model_uid: str) -> Any:
        tracker = supervisor._xavier_cache_mapping.get(model_uid)
        ours = tracker is not None and tracker.uid == tracker_uid(model_uid).encode()
        info = supervisor._model_uid_to_replica_info.get(model_uid)
        result = await original(supervisor, model_uid)
        if ours and info is not None:
            endings = [
                worker.terminate_model(model_uid=f"{model_uid}-rep{replica_id}")
                for replica_id in info.active_replica_ids
                for worker in info.replica_to_worker_refs[replica_id]
            ]
            # A launch in the background no longer finds the model, and so does not clean up.
            if supervisor._xavier_cache_mapping.pop(model_uid, None) is not None:
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
    for book in (
        supervisor._replica_model_uid_to_worker,
        supervisor._replica_model_uid_to_worker_shards,
    ):
        for uid in list(filter(replica_uid.fullmatch, book)):
            del book[uid]


async def _end(ending: Awaitable[Any]) -> None:
    """Log a failure instead of raising, so that the others end too. It may be gone already, its
    worker may be lost, or xinference's own cancel may be unwinding its launch."""
    try:
        await ending
    except Exception as error:
        logger.warning("cleanup after a cancelled launch is incomplete: error=%r", error)

"""A patch for xoscar: a cancel message ends at the pool that it reaches.

A caller that abandons an xoscar call, as at our deadlines, sends a cancel message to the actor's
pool. The main pool of xoscar 0.12 forwards a cancel for any address but its own to a sub-pool. If
it listens on 0.0.0.0 and was reached at 127.0.0.1 or the host's address, it forwards the message to
itself, forever, and occupies up to a whole core.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

_PATCHED = "_xavier_patched"
_OBSERVED = 0.1  # seconds
_SAMPLES = 5


def patch_cancels() -> None:
    """Make main pools of this process forward a cancel to their own sub-pools only. Idempotent;
    also ends loops that run already."""
    try:
        from xoscar.backends.indigen.pool import MainActorPool
        from xoscar.backends.message import MessageType

        handlers = MainActorPool._message_handler
        original = handlers[MessageType.cancel]
    except (ImportError, AttributeError, KeyError) as error:
        logger.warning(
            "cannot patch this xoscar: cancelled calls to a pool on 0.0.0.0 may occupy a core; "
            "start xinference with -H and the host's own address: error=%r",
            error,
        )
        return
    if hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    async def cancel(pool: Any, message: Any) -> Any:
        if message.address not in pool.sub_processes:
            message.address = pool.external_address
        return await original(pool, message)

    setattr(cancel, _PATCHED, True)
    handlers[MessageType.cancel] = cancel


async def cancel_circles() -> bool:
    """Whether a pool of the running loop sends itself a cancel in a loop, which it would do some
    thousand times a second. Observes it for 0.1 s."""
    before = _pending_cancels()
    for _ in range(_SAMPLES):
        await asyncio.sleep(_OBSERVED / _SAMPLES)
        if not _pending_cancels() <= before:
            return True
    return False


def _pending_cancels() -> set[str]:
    """The names of the tasks in which a main pool waits for the answer to a cancel that it has
    forwarded. A cancel that reaches the right pool is answered at once."""
    from xoscar.backends.message import CancelMessage

    def waits(task: asyncio.Task[Any]) -> bool:
        frame = getattr(task.get_coro(), "cr_frame", None)
        values = frame.f_locals if frame is not None else {}
        pool, message = values.get("self"), values.get("message")
        sub_pools = getattr(pool, "sub_processes", ())
        return isinstance(message, CancelMessage) and message.address not in sub_pools

    return {task.get_name() for task in asyncio.all_tasks() if waits(task)}

"""Cancels that end at the pool they reach.

Whoever gives up a call of an xoscar actor sends a cancel to the pool that runs it. The main pool of
xoscar 0.12 takes a cancel under any address but the one it was made with for a sub-pool's and sends
it on: to itself where it listens on 0.0.0.0 and was reached by 127.0.0.1 or by the host's address.
There it arrives again, and so on for ever, at up to a whole core.

Every deadline and every long poll of ours cancels calls, so the pools we run in are mended.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

_MENDED = "_xavier_mended"
_WATCHED = 0.1  # seconds
_LOOKS = 5


def mend_cancels() -> None:
    """A main pool of this process sends a cancel on to its own sub-pools only. Idempotent; ends
    what circles already."""
    try:
        from xoscar.backends.indigen.pool import MainActorPool
        from xoscar.backends.message import MessageType

        _mend(MainActorPool, MessageType.cancel)
    except (ImportError, AttributeError, KeyError) as error:
        logger.warning(
            "this xoscar is built differently (%r): where it listens on 0.0.0.0, a cancelled call "
            "may take a core; start xinference with -H and the host's own address",
            error,
        )


def _mend(pool_type: Any, kind: Any) -> None:
    handlers = pool_type._message_handler
    original = handlers[kind]
    if hasattr(original, _MENDED):
        return

    @functools.wraps(original)
    async def cancel(pool: Any, message: Any) -> Any:
        if message.address not in pool.sub_processes:
            message.address = pool.external_address
        return await original(pool, message)

    setattr(cancel, _MENDED, True)
    handlers[kind] = cancel


async def cancel_circles() -> bool:
    """Whether a pool of the running loop sends a cancel to itself again and again: it does so some
    thousand times a second, and is watched for a tenth of one."""
    before = _cancels_on_their_way()
    for _ in range(_LOOKS):
        await asyncio.sleep(_WATCHED / _LOOKS)
        if not _cancels_on_their_way() <= before:
            return True
    return False


def _cancels_on_their_way() -> set[str]:
    """The names of the tasks in which a main pool waits for the answer to a cancel. A cancel that
    arrives where it belongs is answered at once."""
    from xoscar.backends.message import CancelMessage

    def waits(task: asyncio.Task[Any]) -> bool:
        frame = getattr(task.get_coro(), "cr_frame", None)
        values = frame.f_locals if frame is not None else {}
        pool, message = values.get("self"), values.get("message")
        sub_pools = getattr(pool, "sub_processes", ())
        return isinstance(message, CancelMessage) and message.address not in sub_pools

    return {task.get_name() for task in asyncio.all_tasks() if waits(task)}

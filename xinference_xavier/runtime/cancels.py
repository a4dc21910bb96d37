"""A patch for xoscar: a cancel message ends at the pool that it reaches.

A caller that abandons an xoscar call, as at our deadlines, sends a cancel message to the actor's
pool. The main pool of xoscar 0.12 forwards a cancel for any address but its own to a sub-pool. If
it listens on 0.0.0.0 and was reached at 127.0.0.1 or the host's address, it forwards the message to
itself, forever, and occupies up to a whole core.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

_PATCHED = "_xavier_patched"


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

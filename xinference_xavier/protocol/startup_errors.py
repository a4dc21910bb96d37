"""How the cause of a failed start gets from an engine to whoever launches it.

An engine's process that cannot start logs why and dies; its parent learns only that it died. So
the engine leaves the cause with the model's tracker, where the worker that launched it asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import XavierError
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.deadline import UNREACHABLE, within

logger = logging.getLogger(__name__)

_TIMEOUT = 3.0


def replica_name() -> str:
    """xinference's name for the replica that this process belongs to."""
    return os.environ.get("XINFERENCE_MODEL_UID", "")


def report_startup_error(config: XavierConfig, error: BaseException) -> None:
    """Leave `error` with the tracker; blocks for a few seconds at most and never raises."""

    async def report() -> None:
        try:
            uid = tracker_uid(config.model_uid)
            tracker = await within(_TIMEOUT, xoscar.actor_ref(config.tracker_address, uid))
            await within(_TIMEOUT, tracker.report_startup_error(replica_name(), _text(error)))
        except Exception:
            logger.exception("the cause of the failed start could not be reported")

    # On a thread of its own: the caller's may run an event loop already.
    thread = threading.Thread(target=lambda: asyncio.run(report()))
    thread.start()
    thread.join()


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, XavierError) else f"{type(error).__name__}: {error}"


async def failure_of(config: XavierConfig, replica: str) -> str | None:
    """What the engine of `replica` left with the tracker; None if nothing can be learnt."""
    try:
        uid = tracker_uid(config.model_uid)
        tracker = await within(_TIMEOUT, xoscar.actor_ref(config.tracker_address, uid))
        cause: str | None = await within(_TIMEOUT, tracker.pop_startup_error(replica))
    except UNREACHABLE:
        return None
    return cause

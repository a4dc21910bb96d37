"""Carries the cause of a failed start from an engine to the worker that launches it.

An engine that cannot start logs the cause and exits; its parent learns only that it exited. So the
engine reports the cause to the model's tracker, and the worker asks there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from typing import Any

from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import XavierError
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.aio import UNREACHABLE, ask

logger = logging.getLogger(__name__)

_TIMEOUT = 3.0
_RANK = re.compile(r"_dp\d+$")


def replica_name(engine_id: str = "", given: str | None = None) -> str:
    """xinference's name for the replica of this process; without xinference the `given` one, or
    empty.

    With data parallelism a replica has several engines, and vLLM's ids of them end in `_dp0` etc.
    The name of each ends likewise.
    """
    name = os.environ.get("XINFERENCE_MODEL_UID") or given or ""
    rank = _RANK.search(engine_id)
    return name + rank[0] if name and rank else name


def without_rank(name: str) -> str:
    """The replica that an engine of that name belongs to."""
    return _RANK.sub("", name)


def report_startup_error(config: XavierConfig, error: BaseException) -> None:
    """Report `error` to the tracker. Blocks for a few seconds at most, and never raises.

    Without xinference, nobody asks the tracker for it.
    """
    replica = replica_name()
    if not replica:
        return

    async def report() -> None:
        known = isinstance(error, XavierError)
        try:
            cause = str(error) if known else f"{type(error).__name__}: {error}"
            await _ask_tracker(config, "report_startup_error", replica, cause)
        except Exception:
            logger.exception("cannot report the cause of the failed start")

    # On a thread of its own, because the caller's may run an event loop already.
    thread = threading.Thread(target=lambda: asyncio.run(report()))
    thread.start()
    thread.join()


async def pop_startup_error(config: XavierConfig, replica: str) -> str | None:
    """The cause that the engine of `replica` reported; None if the tracker has none."""
    try:
        cause: str | None = await _ask_tracker(config, "pop_startup_error", replica)
    except UNREACHABLE:
        return None
    return cause


async def _ask_tracker(config: XavierConfig, method: str, *args: object) -> Any:
    uid = tracker_uid(config.model_uid)
    return await ask(_TIMEOUT, config.tracker_address, uid, method, *args)

"""The process that started this one, and its end."""

from __future__ import annotations

import multiprocessing
import os
import select

GRACE = 10.0
"""Seconds that an engine without a parent has to end by itself."""


def parent_pid() -> int | None:
    """None unless multiprocessing started this process."""
    parent = multiprocessing.parent_process()
    return None if parent is None else parent.pid


def await_end(pid: int) -> None:
    """Return when the process has ended. Raises OSError if it cannot be watched."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it ended already
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.poll()
    os.close(process)

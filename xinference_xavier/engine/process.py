"""Ends an engine with its parent process, and makes our log lines look like vLLM's.

vLLM's engine outlives a parent that was killed. Such an orphan would keep its memory and offer its
rows while xinference starts another engine in its place. If it hangs in C and holds Python's lock,
no thread of its own can end it; then its transfer process does.

vLLM configures only its own logger, so Python drops other packages' lines below WARNING and prints
the rest without a format.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

from xinference_xavier.runtime.parent import GRACE, await_end, parent_pid

logger = logging.getLogger(__name__)

_watching = set[int]()
"""Processes with such a thread: a fork has its parent's entry, but not the thread."""


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, and SIGKILL if that is not enough, from a
    thread that waits for that.

    Does nothing unless multiprocessing started this process. Idempotent.
    """
    parent = parent_pid()
    if parent is not None and os.getpid() not in _watching:
        _watching.add(os.getpid())
        threading.Thread(target=_watch, args=(parent,), name="xavier-parent", daemon=True).start()


def _watch(pid: int) -> None:
    try:
        await_end(pid)
    except OSError as error:
        logger.warning("cannot watch the parent process: pid=%d error=%r", pid, error)
        return
    logger.warning("parent process ended, ending this engine: pid=%d", pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)  # Python's handler does not run while the engine hangs in C
    os.kill(os.getpid(), signal.SIGKILL)


def log_like_vllm() -> None:
    """Send our log lines where vLLM's go, unless our logger is configured already. Idempotent."""
    follow(logging.getLogger("xinference_xavier"), logging.getLogger("vllm"))


def follow(ours: logging.Logger, vllms: logging.Logger) -> None:
    if ours.hasHandlers() or not vllms.handlers:
        return
    for handler in vllms.handlers:
        ours.addHandler(handler)
    ours.setLevel(vllms.level)

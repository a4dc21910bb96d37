"""Ends an engine with its parent process, and makes our log lines look like vLLM's.

vLLM's engine outlives a parent that was killed. Such an orphan would keep its memory and offer its
rows while xinference starts another engine in its place.

vLLM configures only its own logger, so Python drops other packages' lines below WARNING and prints
the rest without a format.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading

logger = logging.getLogger(__name__)


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, from a thread that waits for that.

    Does nothing unless multiprocessing started this process.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        threading.Thread(
            target=_watch, args=(parent.pid,), name="xavier-parent", daemon=True
        ).start()


def _watch(pid: int) -> None:
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        pass  # it ended already
    except OSError as error:
        logger.warning("cannot watch the parent process: pid=%d error=%r", pid, error)
        return
    else:
        waiting = select.poll()
        waiting.register(parent, select.POLLIN)
        waiting.poll()
        os.close(parent)
    logger.warning("parent process ended, ending this engine: pid=%d", pid)
    os.kill(os.getpid(), signal.SIGTERM)


def log_like_vllm() -> None:
    """Send our log lines where vLLM's go, unless our logger is configured already. Idempotent."""
    follow(logging.getLogger("xinference_xavier"), logging.getLogger("vllm"))


def follow(ours: logging.Logger, vllms: logging.Logger) -> None:
    if ours.hasHandlers() or not vllms.handlers:
        return
    for handler in vllms.handlers:
        ours.addHandler(handler)
    ours.setLevel(vllms.level)

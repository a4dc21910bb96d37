"""An engine's process ends with the process that started it, and its log lines look like vLLM's.

vLLM's engine waits for ever for a parent that was killed, and an orphan keeps its memory and offers
its rows while xinference starts another engine in its place. vLLM sets up only its own logger, so
lines of other packages are lost below WARNING and bare above it.
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
    """End this process by SIGTERM when its parent ends; for an engine that runs in a process of its
    own, which multiprocessing has started. One thread, which waits."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        threading.Thread(
            target=_watch, args=(parent.pid,), name="xavier-parent", daemon=True
        ).start()


def _watch(pid: int) -> None:
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        pass  # it has ended already
    except OSError as error:
        logger.warning("this engine cannot be told when its parent %d ends: %s", pid, error)
        return
    else:
        waiting = select.poll()
        waiting.register(parent, select.POLLIN)
        waiting.poll()
        os.close(parent)
    logger.warning("process %d, which started this engine, is gone: so is the engine", pid)
    os.kill(os.getpid(), signal.SIGTERM)


def log_like_vllm() -> None:
    """Ours go where vLLM's go, unless somebody has said where ours go. Idempotent."""
    follow(logging.getLogger("xinference_xavier"), logging.getLogger("vllm"))


def follow(ours: logging.Logger, vllms: logging.Logger) -> None:
    if ours.hasHandlers() or not vllms.handlers:
        return
    for handler in vllms.handlers:
        ours.addHandler(handler)
    ours.setLevel(vllms.level)

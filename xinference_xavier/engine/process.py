"""An engine's process ends with its parent, logs like vLLM, and reports why it could not start.

vLLM's engine outlives a parent that was killed. Such an orphan would keep its memory and offer its
rows while xinference starts another engine in its place. If it hangs in C and holds Python's lock,
no thread of its own can end it; then its transfer process does.

vLLM configures only its own logger, so Python drops other packages' lines below WARNING and prints
the rest without a format.

vLLM logs why an engine did not start, but does not report it to the launcher. So each process that
should share listens to the log of engines and their workers, and reports the cause to the model's
tracker. The worker that launches the engine asks there.
"""

import asyncio
import logging
import os
import signal
import threading
import time
import traceback

from xinference_xavier.config import XAVIER, XavierConfig
from xinference_xavier.errors import XavierError
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.protocol.tracker import replica_name, tracker_uid
from xinference_xavier.runtime.aio import ask
from xinference_xavier.runtime.host import GRACE, await_end, parent_pid

logger = logging.getLogger(__name__)

_watching = set[int]()
"""Processes with such a thread: a fork has its parent's entry, but not the thread."""


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, and SIGKILL if that is not enough, from a
    thread that waits for that. A process without a handler gets no SIGTERM: vLLM takes its own away
    before it frees what an engine has, such as shared memory, which a signal would leave behind.

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
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
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


_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_PHRASE = "failed to start"


def report_failed_starts() -> None:
    """Report errors that end a start in this process to the model's tracker. Idempotent."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Listener) for handler in logger.handlers):
            logger.addHandler(_Listener(logging.ERROR))


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or _PHRASE not in record.getMessage():
            return
        config = _config_of(error)
        if config is not None:
            report_startup_error(config, error)


def _config_of(error: BaseException) -> XavierConfig | None:
    """The configuration of the engine that failed to start; None if it shares nothing."""
    # The log record names no engine, but the code that failed had the engine's configuration.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        transfer = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        extra = getattr(transfer, "kv_connector_extra_config", None)
        if extra and XAVIER in extra:
            return XavierConfig.from_dict(extra[XAVIER])
    return None


def report_startup_error(config: XavierConfig, error: BaseException) -> None:
    """Report `error` to the tracker. Blocks for a few seconds at most, and never raises.

    Without xinference, nobody asks the tracker for it.
    """
    replica, uid = replica_name(), tracker_uid(config.model_uid)
    if not replica:
        return

    def report() -> None:
        known = isinstance(error, XavierError)
        try:
            cause = str(error) if known else f"{type(error).__name__}: {error}"
            call = ("report_startup_error", replica, cause)
            asyncio.run(ask(CALL_DEADLINE, config.tracker, uid, *call))
        except Exception:
            logger.exception("cannot report the cause of the failed start")

    # On a thread of its own, because the caller's may run an event loop already.
    thread = threading.Thread(target=report)
    thread.start()
    thread.join()

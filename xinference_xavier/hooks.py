"""Calls the operator's function (option `xavier_hooks`) with the events of a model.

Threading: on a thread of its own, one event after the other, in the process where the event
happens. If the function raises, the first error is logged and further ones are counted. If it
hangs, `MAX_WAITING` events wait, and later ones are dropped and counted.
"""

from __future__ import annotations

import logging
import pkgutil
import queue
import threading
from collections.abc import Callable

from xinference_xavier.errors import ConfigError
from xinference_xavier.events import Event

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
OPTION = "xavier_hooks"

Hook = Callable[[Event], object]


class Hooks:
    """`failed` counts the events at which `hook` raised, `dropped` those it was too slow for."""

    def __init__(self, hook: Hook | None = None) -> None:
        self._hook = hook
        self._waiting: queue.Queue[Event] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self.notified = 0
        self.failed = 0
        self.dropped = 0

    def notify(self, event: Event) -> None:
        if self._hook is None:
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.error(  # noqa: TRY400  # the queue is full: a traceback would not help
                    "%s is too slow; events are dropped and counted from now on", OPTION
                )
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._notify_all, args=(self._hook,), name="xavier-hooks", daemon=True
            )
            self._thread.start()

    def _notify_all(self, hook: Hook) -> None:
        while True:
            event = self._waiting.get()
            try:
                hook(event)
                self.notified += 1
            except Exception:
                self.failed += 1
                if self.failed == 1:
                    logger.exception("%s failed, further failures are only counted", OPTION)


def load_hook(path: str) -> Hook:
    """Import the function named "module:function". Raises ConfigError."""
    try:
        hook = pkgutil.resolve_name(path)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(
            OPTION,
            path,
            f"cannot be imported ({type(error).__name__}: {error})",
            "name a function of a module that is installed on the supervisor and every worker",
        ) from None
    if not callable(hook):
        raise ConfigError(OPTION, path, "is not a function", "name one as module:function")
    function: Hook = hook
    return function


def hooks_of(path: str | None) -> Hooks:
    """Like `Hooks(load_hook(path))`, but log an import error and go on without hooks."""
    try:
        return Hooks(None if path is None else load_hook(path))
    except ConfigError as error:
        logger.error("%s", error)  # noqa: TRY400  # the text is complete
        return Hooks()

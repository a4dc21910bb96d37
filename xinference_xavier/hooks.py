"""Calls a function of the operator, `xavier_hooks`, with each event.

    def page_somebody(event: Event) -> None: ...

Threading: the function runs on a thread of its own, one event after the other, in the process in
which the event happens: launches in the supervisor, membership in the tracker's process, fetches
and loss of the tracker in the replica. `Hooks.notify` returns at once. An exception is logged once
and counted. If the function hangs, `MAX_WAITING` events wait, and later ones are dropped and
counted.
"""

from __future__ import annotations

import importlib
import logging
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
                logger.error("%s is too slow; events are dropped and counted from now on", OPTION)
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
                    logger.exception("%s failed; later failures are only counted", OPTION)


def load_hook(path: str) -> Hook:
    """The function that "module:function" names.

    Raises:
        ConfigError: this process cannot import it.
    """
    module, _, name = path.partition(":")
    try:
        hook = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything while it is imported
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
    """For a process that goes on without hooks if they cannot be imported."""
    if path is None:
        return Hooks()
    try:
        return Hooks(load_hook(path))
    except ConfigError as error:
        logger.error("%s", error)
        return Hooks()

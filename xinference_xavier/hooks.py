"""What happens to a model's sharing, told to a function of the operator's: `xavier_hooks`.

    def page_somebody(event: Event) -> None: ...

Threading: the function is called on a thread of its own, one event after the other, in whichever
process the event happens: launches at the supervisor, members where the tracker is, fetches and the
tracker's absence at a replica. `Hooks.tell` returns at once. A function that raises is logged once
and counted; one that hangs lets `MAX_WAITING` events wait and costs the later ones, which are
counted too.
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
    """Tells `hook` of events; nobody, if there is none."""

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
                logger.error("%s does not return: events are dropped from now on", OPTION)
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
    """The function behind "module:function".

    Raises:
        ConfigError: there is none in this process.
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
    found: Hook = hook
    return found


def hooks_of(path: str | None) -> Hooks:
    """For a process that goes on without them where they cannot be imported."""
    if path is None:
        return Hooks()
    try:
        return Hooks(load_hook(path))
    except ConfigError as error:
        logger.error("%s", error)
        return Hooks()

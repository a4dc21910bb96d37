"""The events of a model's sharing, and the operator's function that is called with them.

Between processes, an event is a JSON object: `event` is the name of the class, the other keys are
its fields.

`Hooks` calls the function (option `xavier_hooks`) on a thread of its own, one event after the
other, in the process where the event happens. If the function raises, the first error is logged and
further ones are counted. If it hangs, `MAX_WAITING` events wait, and later ones are dropped and
counted.
"""

import logging
import math
import pkgutil
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from xinference_xavier.errors import ConfigError, shown
from xinference_xavier.runtime.validate import check_json_size


@dataclass(frozen=True, kw_only=True)
class Event:
    """`time` is in seconds since 1970."""

    model_uid: str
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class LaunchRolledBack(Event):
    """A launch failed and was undone. `reason` is its error."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ReplicaJoined(Event):
    """`replica` is xinference's name for it, `incarnation` vLLM's engine id."""

    replica: str
    incarnation: str
    address: str


@dataclass(frozen=True, kw_only=True)
class ReplicaLost(Event):
    """A replica's lease expired: no heartbeat arrived."""

    replica: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class ReplicaRecovered(Event):
    """A lost replica joined again, perhaps as another incarnation."""

    replica: str
    incarnation: str
    address: str


@dataclass(frozen=True, kw_only=True)
class ReplicaDraining(Event):
    """A replica is about to be removed. It has at most `seconds` for the requests that it has."""

    replica: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ReplicaDrained(Event):
    """A replica is removed now. Of its requests, `requests` have not ended. Peers have fetched
    `chunks` that only it held."""

    replica: str
    requests: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class FetchRolledBack(Event):
    """Only `committed` of the `rows` wanted became hits."""

    incarnation: str
    donor: str
    reason: str
    rows: int
    committed: int


@dataclass(frozen=True, kw_only=True)
class ReplicasDiffer(Event):
    """Two replicas computed different rows of the same text, so they share nothing.

    `layer` is the first one that differs, by `amount` relative to the size of its numbers.
    """

    incarnation: str
    peer: str
    layer: str
    amount: float


@dataclass(frozen=True, kw_only=True)
class AuditFailed(Event):
    """A chunk that came from `donor`, empty if the replica's own, differs from what the replica
    computes. Everything from there was dropped."""

    incarnation: str
    donor: str
    layer: str
    amount: float


@dataclass(frozen=True, kw_only=True)
class TrackerLost(Event):
    incarnation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrackerRegained(Event):
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class SharingSwitched(Event):
    """Sharing of all replicas was switched on or off."""

    enabled: bool


@dataclass(frozen=True, kw_only=True)
class RoutingChanged(Event):
    """How requests find a replica was changed; with an empty `routing`, to that of the launch."""

    routing: str


@dataclass(frozen=True, kw_only=True)
class CacheFlushed(Event):
    """An operator made `replicas` replicas drop what they hold."""

    replicas: int


MAX_EVENT_BYTES = 4096  # as JSON


def event_dict(event: Event) -> dict[str, Any]:
    """The JSON form of `event`."""
    return {"event": type(event).__name__, **asdict(event)}


def check_event(event: object) -> None:
    """Check an event in JSON form. Raises ValueError."""
    if not isinstance(event, Mapping):
        raise ValueError(f"event={shown(event)} is not a dictionary")
    kind, when = event.get("event"), event.get("time")
    if not isinstance(kind, str) or kind not in {
        known.__name__ for known in Event.__subclasses__()
    }:
        raise ValueError(f"event={shown(kind)} is not a known event")
    if not isinstance(when, float) or not abs(when) < math.inf:
        raise ValueError(f"time={shown(when)} is not a number of seconds")
    check_json_size(f"event={kind}", event, MAX_EVENT_BYTES)


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

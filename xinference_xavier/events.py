"""The events of a model's sharing, and the operator's function that the tracker calls with them
(option `xavier_hooks`).

Between processes, an event is a JSON object: `event` is the name of the class, the other keys are
its fields.
"""

import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from xinference_xavier.errors import ConfigError, shown
from xinference_xavier.runtime.validate import check_json_size


@dataclass(frozen=True, kw_only=True)
class Event:
    """`time` is in seconds since 1970."""

    model_uid: str
    time: float = field(default_factory=time.time)


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
    """A replica lost the tracker. The event reaches the next one."""

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
    """The routing was changed; an empty `routing` is that of the launch."""

    routing: str


@dataclass(frozen=True, kw_only=True)
class CacheFlushed(Event):
    """An operator made `replicas` replicas drop what they hold."""

    replicas: int


MAX_EVENT_BYTES = 4096  # as JSON
_KINDS = {kind.__name__: TypeAdapter(kind) for kind in Event.__subclasses__()}


def event_dict(event: Event) -> dict[str, Any]:
    """The JSON form of `event`."""
    return {"event": type(event).__name__, **asdict(event)}


def read_event(plain: object) -> Event:
    """An event from its JSON form. Raises ValueError."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"event={shown(plain)} is not a dictionary")
    fields = dict(plain)
    kind = fields.pop("event", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"event={shown(kind)} is not a known event")
    check_json_size(f"event={kind}", fields, MAX_EVENT_BYTES)
    event: Event = _KINDS[kind].validate_python(fields)
    return event


Hook = Callable[[Event], object]


def load_hook(path: str) -> Hook:
    """Import the function named "module:function". Raises ConfigError."""
    try:
        hook = pkgutil.resolve_name(path)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(
            "xavier_hooks",
            path,
            f"cannot be imported ({type(error).__name__}: {error})",
            "name a function of a module that is installed where the tracker runs",
        ) from None
    if not callable(hook):
        raise ConfigError("xavier_hooks", path, "is not a function", "name one as module:function")
    function: Hook = hook
    return function

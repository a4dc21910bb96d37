"""The events of a model's sharing, and their form between processes.

That form is a JSON object: `event` is the name of the class, the other keys are its fields.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from xinference_xavier.errors import shown
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
    """Its lease expired: no heartbeat arrived."""

    replica: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class ReplicaRecovered(Event):
    """A lost replica joined again, perhaps as another incarnation."""

    replica: str
    incarnation: str
    address: str


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
    """An operator switched sharing of all replicas on or off."""

    enabled: bool


@dataclass(frozen=True, kw_only=True)
class RoutingChanged(Event):
    """An operator changed how requests are routed."""

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

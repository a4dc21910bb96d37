"""A model's status as people and programs get it: the tracker's, flattened and summed up. Pure.

Reports are untrusted JSON, read leniently into the dataclasses of `stats.schema`. `History` keeps
the last hour: a sample sums up what all replicas counted since their start, including those that
left. Sums never fall while one tracker lives, so the difference of two samples is a rate.
"""

import functools
import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from xinference_xavier.limits import LIMIT
from xinference_xavier.stats.schema import Counters, ReplicaStats, Totals, TrackerStats

MAX_NUMBER = 1 << 63

_T = TypeVar("_T")


def read(kind: type[_T], raw: object) -> _T:
    """Make a dataclass from a dictionary of its fields.

    A missing value gets the field's default, a malformed one becomes zero or empty. Unknown keys
    are ignored; a field named `raw` gets the whole dictionary. Raises KeyError if a field without
    default is missing.
    """
    sent = raw if isinstance(raw, Mapping) else {}
    values = {**sent, "raw": sent}
    return kind(
        **{
            name: _value(hint, values[name])
            for name, (hint, required) in _fields(kind).items()  # type: ignore[arg-type]
            if required or name in values
        }
    )


def add(total: Any, part: Any) -> None:
    """Add the numbers of `part` to `total`, whose fields `part` has too. Lists have one length."""
    for name in vars(total):
        value, more = getattr(total, name), getattr(part, name)
        if is_dataclass(value):
            add(value, more)
        elif isinstance(value, dict):
            for key, number in more.items():
                value[key] = value.get(key, 0) + number
        elif isinstance(value, list):
            value[:] = [number + other for number, other in zip(value, more, strict=True)]
        else:
            setattr(total, name, value + more)


@functools.cache
def _fields(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """Type and whether it is required, by name."""
    hints = get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
    }


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its arguments, and these."""
    return get_origin(hint) or hint, get_args(hint)


def _value(hint: Any, value: object) -> Any:
    if hint is int or hint is float:  # most are numbers
        return _number(value)
    origin, arguments = _parts(hint)
    if hint is Any:
        return value
    if is_dataclass(origin):
        return read(origin, value)  # type: ignore[arg-type]  # a hint is a type
    if origin is UnionType:
        return None if value is None else _value(arguments[0], value)
    if origin in (list, tuple):
        items = value if isinstance(value, (list, tuple)) else ()
        return origin(_value(arguments[0], item) for item in items)
    if not isinstance(value, origin):
        return origin()
    if isinstance(value, dict):
        return {str(key): _value(arguments[1], item) for key, item in value.items()}
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return value if 0 <= value < MAX_NUMBER else 0


INTERVAL = 10.0
"""Seconds between two samples."""
MAX_SAMPLES = 360
ANY_REASON = "any"
"""Stands for all reasons of rollbacks, because peers could invent any number of them."""


class History:
    """Call `tick` often: it takes a sample every `INTERVAL`."""

    def __init__(self) -> None:
        self._latest: dict[str, Counters] = {}
        self._forgotten = Counters()
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._json: bytes | None = None
        self._due = -math.inf

    def record(self, incarnation: str, stats: Mapping[str, Any]) -> None:
        """Keep what a replica counted since its start; `stats` are as it reports them."""
        counters = read(Counters, stats)
        rolled_back = sum(counters.fetches.rolled_back.values())
        counters.fetches.rolled_back = {ANY_REASON: rolled_back}
        self._latest.pop(incarnation, None)
        self._latest[incarnation] = counters
        if len(self._latest) > LIMIT:
            add(self._forgotten, self._latest.pop(next(iter(self._latest))))

    def tick(self, now: float, time: float) -> None:
        """`now` is in monotonic seconds, `time` in seconds since 1970."""
        if now >= self._due:
            self._due = now + INTERVAL
            total = Counters()
            for counters in (self._forgotten, *self._latest.values()):
                add(total, counters)
            self._samples.append({"time": time, **asdict(total)})
            self._json = None

    def to_json(self) -> bytes:
        """`interval_s` and `samples`, which have `time` and the fields of `Counters`; the oldest
        comes first. Made once for each sample."""
        if self._json is None:
            history = {"interval_s": INTERVAL, "samples": list(self._samples)}
            self._json = json.dumps(history, allow_nan=False).encode()
        return self._json


def report(status: Mapping[str, Any]) -> dict[str, Any]:
    """What `ModelStatus` is read from; `status` is the tracker's. JSON-able.

    A replica that has not reported yet shows zeros. What a newer one reports beyond `ReplicaStats`
    is passed through.
    """
    replicas = [
        _replica(namespace, entry)
        for namespace, group in status["namespaces"].items()
        for entry in group["replicas"]
    ]
    replicas.sort(key=_by_name)
    totals = Totals()
    for replica in replicas:
        add(totals, read(Totals, replica))
    return {
        "model_uid": status["model_uid"],
        "enabled": status["enabled"],
        "replicas": replicas,
        "totals": asdict(totals),
        "tracker": asdict(read(TrackerStats, status)),
        **status.get("named", {}),  # only under xinference
    }


def _by_name(replica: Mapping[str, Any]) -> tuple[int, str, str]:
    """m-2 before m-10."""
    name = str(replica.get("replica", ""))
    return len(name), name, replica["incarnation"]


def _replica(namespace: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    stats = entry["stats"]
    return {
        "stale": False,
        **stats,
        **asdict(read(ReplicaStats, stats)),
        **{name: value for name, value in entry.items() if name != "stats"},
        "namespace": namespace,
    }

"""Which replicas of a model joined, were lost and came back, and why some never started.

Pure: no I/O, and no clock but for the events' own time. Bounded: the replica seen longest ago is
forgotten first.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

from xinference_xavier.errors import shown
from xinference_xavier.events import Event, ReplicaJoined, ReplicaLost, ReplicaRecovered
from xinference_xavier.protocol.tracker import Member

MAX_REMEMBERED = 10_000
_T = TypeVar("_T")
MAX_STARTUP_ERRORS = 1000
MAX_STARTUP_ERROR = 2000
"""Characters kept of why a replica did not start."""


class Membership:
    """A replica keeps its name over its incarnations; one without a name goes by incarnation."""

    def __init__(self, model_uid: str) -> None:
        self._model_uid = model_uid
        self._names: dict[str, str] = {}  # of every incarnation seen
        self._lost: dict[str, None] = {}  # names, in order

    def joined(self, name: str, member: Member) -> Event | None:
        """None for one that is known already: it only moves, or renews."""
        incarnation, address = member
        name = name or incarnation
        known = self._names.get(incarnation) == name
        _remember(self._names, incarnation, name)
        if name in self._lost:
            del self._lost[name]
            event: type[ReplicaJoined | ReplicaRecovered] = ReplicaRecovered
        elif known:
            return None
        else:
            event = ReplicaJoined
        return event(
            model_uid=self._model_uid, replica=name, incarnation=incarnation, address=address
        )

    def name_of(self, incarnation: str) -> str:
        return self._names.get(incarnation, incarnation)

    def lost(self, incarnation: str) -> Event:
        name = self.name_of(incarnation)
        _remember(self._lost, name, None)
        return ReplicaLost(model_uid=self._model_uid, replica=name, incarnation=incarnation)


def _remember(book: MutableMapping[str, _T], key: str, value: _T) -> None:
    book.pop(key, None)
    book[key] = value
    if len(book) > MAX_REMEMBERED:
        del book[next(iter(book))]


class StartupErrors:
    """What the tracker keeps. `refused` counts those that were too many."""

    def __init__(self) -> None:
        self.refused = 0
        self._startup_errors: dict[str, str] = {}

    def record(self, replica: str, cause: object) -> None:
        """The first one stays, until it is taken: others follow from it."""
        if not isinstance(cause, str):
            raise ValueError(f"cause={shown(cause)} is not text")
        if len(self._startup_errors) < MAX_STARTUP_ERRORS or replica in self._startup_errors:
            self._startup_errors.setdefault(replica, cause[:MAX_STARTUP_ERROR])
        else:
            self.refused += 1

    def pop(self, replica: str) -> str | None:
        return self._startup_errors.pop(replica, None)

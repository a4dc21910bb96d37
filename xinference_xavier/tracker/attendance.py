"""Which replicas of a model came, were lost and came back, over all namespaces.

Pure: no I/O, no clock but for the events' own time. Bounded: who was seen longest ago is forgotten.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

from xinference_xavier.hooks import Event, ReplicaJoined, ReplicaLost, ReplicaRecovered
from xinference_xavier.tracker.index import Member

MAX_REMEMBERED = 10_000

_T = TypeVar("_T")


class Attendance:
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

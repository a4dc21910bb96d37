"""Which replicas of a model joined, were lost and came back, and why some never started. Pure: no
I/O, and no clock but the time stamps of events. Bounded: the oldest entries are forgotten."""

from xinference_xavier.errors import shown
from xinference_xavier.events import Event, ReplicaJoined, ReplicaLost, ReplicaRecovered
from xinference_xavier.protocol.tracker import Member

MAX_REMEMBERED = 10_000
"""Incarnations, and names of lost replicas."""
MAX_STARTUP_ERRORS = 1000
MAX_STARTUP_ERROR = 2000
"""Characters kept of why a replica did not start."""


class Membership:
    """Turns joins and losses into events. A replica keeps its name over its incarnations; without a
    name it goes by its incarnation."""

    def __init__(self, model_uid: str) -> None:
        self._model_uid = model_uid
        self._names: dict[str, str] = {}  # by incarnation
        self._lost: dict[str, str] = {}  # incarnations, by name

    def joined(self, name: str, member: Member) -> Event | None:
        """The event to report; None for a member that only renews or changes its namespace."""
        incarnation, address, _ = member
        name = name or incarnation
        has_joined = self._names.get(incarnation) == name
        _remember(self._names, incarnation, name)
        if self._lost.pop(name, None) is not None:
            event: type[ReplicaJoined | ReplicaRecovered] = ReplicaRecovered
        elif has_joined:
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
        _remember(self._lost, name, incarnation)
        return ReplicaLost(model_uid=self._model_uid, replica=name, incarnation=incarnation)


def _remember(entries: dict[str, str], key: str, value: str) -> None:
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > MAX_REMEMBERED:
        del entries[next(iter(entries))]


class StartupErrors:
    """Why replicas did not start. `refused` counts those beyond `MAX_STARTUP_ERRORS`."""

    def __init__(self) -> None:
        self.refused = 0
        self._causes: dict[str, str] = {}

    def record(self, replica: str, cause: object) -> None:
        """Keep `cause` unless there is an earlier one, of which it may be a consequence."""
        if not isinstance(cause, str):
            raise ValueError(f"cause={shown(cause)} is not text")
        if len(self._causes) < MAX_STARTUP_ERRORS or replica in self._causes:
            self._causes.setdefault(replica, cause[:MAX_STARTUP_ERROR])
        else:
            self.refused += 1

    def pop(self, replica: str) -> str | None:
        return self._causes.pop(replica, None)

"""Events of a replica, for the operator's hook and, with the next heartbeat, for the tracker."""

from __future__ import annotations

from collections import deque
from typing import Any

from xinference_xavier.config import XavierConfig
from xinference_xavier.events import (
    Event,
    FetchRolledBack,
    TrackerLost,
    TrackerRegained,
    event_dict,
)
from xinference_xavier.hooks import hooks_of
from xinference_xavier.protocol.tracker import MAX_REPORTED
from xinference_xavier.replica.fetcher import Fetch


class EventReporter:
    """`pending` are the events that the tracker was not told of yet. For the background loop."""

    def __init__(self, config: XavierConfig, incarnation: str) -> None:
        self.pending: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTED)
        self._model_uid = config.model_uid
        self._incarnation = incarnation
        self.hooks = hooks_of(config.hooks)

    def outage(self, error: BaseException | None) -> None:
        """The tracker was lost because of `error`, or is there again if that is None."""
        uid, incarnation = self._model_uid, self._incarnation
        if error is None:
            self._notify(TrackerRegained(model_uid=uid, incarnation=incarnation))
        else:
            self._notify(TrackerLost(model_uid=uid, incarnation=incarnation, reason=repr(error)))

    def rolled_back(self, fetch: Fetch, reason: str) -> None:
        self._notify(
            FetchRolledBack(
                model_uid=self._model_uid,
                incarnation=self._incarnation,
                donor=fetch.donor,
                reason=reason,
                rows=len(fetch.rows),
                committed=len(fetch.committed),
            )
        )

    def _notify(self, event: Event) -> None:
        self.hooks.notify(event)
        self.pending.append(event_dict(event))

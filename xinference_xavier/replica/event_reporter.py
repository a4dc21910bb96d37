"""Reports a replica's events: to the operator's hook, with the next heartbeat to the tracker, and
outages of the tracker to the log."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from xinference_xavier.config import XavierConfig
from xinference_xavier.events import (
    AuditFailed,
    Event,
    FetchRolledBack,
    ReplicasDiffer,
    TrackerLost,
    TrackerRegained,
    event_dict,
    hooks_of,
)
from xinference_xavier.pool.tier import Fetch
from xinference_xavier.protocol.tracker import MAX_REPORTED
from xinference_xavier.replica.canary import Difference

logger = logging.getLogger(__name__)


class EventReporter:
    """Lives on the background loop. `pending` are the events that the tracker does not have yet."""

    def __init__(self, config: XavierConfig, incarnation: str) -> None:
        self.pending: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTED)
        self._model_uid = config.model_uid
        self._incarnation = incarnation
        self.hooks = hooks_of(config.hooks)
        self._tracker_lost = False

    def tracker_session(self, error: Exception | None) -> None:
        """A session with the tracker has begun, or failed with `error`. Only the first failure of
        an outage is reported."""
        was_lost, self._tracker_lost = self._tracker_lost, error is not None
        if self._tracker_lost == was_lost:
            return
        uid, incarnation = self._model_uid, self._incarnation
        if error is None:
            logger.info("tracker joined again: model=%s incarnation=%s", uid, incarnation)
            self._notify(TrackerRegained(model_uid=uid, incarnation=incarnation))
        else:
            logger.warning(
                "tracker lost, retrying: model=%s incarnation=%s error=%r", uid, incarnation, error
            )
            self._notify(TrackerLost(model_uid=uid, incarnation=incarnation, reason=repr(error)))

    def rolled_back(self, fetch: Fetch, reason: str) -> None:
        self._notify(
            FetchRolledBack(
                model_uid=self._model_uid,
                incarnation=self._incarnation,
                donor=fetch.source,
                reason=reason,
                rows=len(fetch.rows),
                committed=len(fetch.committed),
            )
        )

    def differs(self, peer: str, difference: Difference) -> None:
        logger.error(
            "peer computes different rows, not sharing with it: incarnation=%s peer=%s layer=%s "
            "difference=%.3g",
            self._incarnation,
            peer,
            *difference,
        )
        self._notify(
            ReplicasDiffer(
                model_uid=self._model_uid,
                incarnation=self._incarnation,
                peer=peer,
                layer=difference.layer,
                amount=min(difference.amount, 1e9),
            )
        )

    def audit_failed(self, donor: str | None, difference: Difference) -> None:
        logger.error(
            "audit failed, rows are dropped: incarnation=%s donor=%s layer=%s difference=%.3g",
            self._incarnation,
            donor,
            *difference,
        )
        self._notify(
            AuditFailed(
                model_uid=self._model_uid,
                incarnation=self._incarnation,
                donor=donor or "",
                layer=difference.layer,
                amount=min(difference.amount, 1e9),
            )
        )

    def _notify(self, event: Event) -> None:
        self.hooks.notify(event)
        self.pending.append(event_dict(event))

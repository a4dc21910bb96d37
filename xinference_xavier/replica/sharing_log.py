"""One line in the log when a replica's sharing begins to work, and one when it stops."""

from __future__ import annotations

import logging

from xinference_xavier.errors import (
    ALONE,
    NO_PEERS,
    NO_TRANSFER_PROCESS,
    NOT_JOINED,
    RESETTING,
    SWITCHED_OFF,
)

logger = logging.getLogger(__name__)


_EXPLAINED = {
    SWITCHED_OFF: "it was switched off",
    NOT_JOINED: "it has not joined a tracker",
    RESETTING: "its prefix cache is being reset",
    NO_TRANSFER_PROCESS: "it has no transfer process; one is started again",
    ALONE: "its prefix cache was reset and nobody has said which weights it has",
    NO_PEERS: "no other replica of the same namespace is there",
}


class SharingLog:
    """A replica's state as of the last look at it. Nothing is said before it works first."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._works = False

    def update(self, reason: str | None, peers: int) -> None:
        """`reason` is why it does not share, None if it does with `peers` peers."""
        if self._works == (reason is None):
            return
        self._works = reason is None
        if reason is None:
            logger.info("replica %s: sharing works, peers: %d", self._incarnation, peers)
        else:
            logger.warning("replica %s: sharing stopped: %s", self._incarnation, _EXPLAINED[reason])

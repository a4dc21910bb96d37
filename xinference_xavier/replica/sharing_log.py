"""One line in the log when a replica's sharing begins to work, and one when it stops."""

from __future__ import annotations

import logging

from xinference_xavier.errors import (
    ALONE,
    NO_PEERS,
    NO_PREFIX_CACHING,
    NO_TRANSFER_PROCESS,
    NOT_JOINED,
    RESETTING,
    SWITCHED_OFF,
)

logger = logging.getLogger(__name__)

_EXPLAINED = {
    NO_PREFIX_CACHING: "prefix caching is off",
    SWITCHED_OFF: "switched off by an operator",
    NOT_JOINED: "no tracker found yet",
    RESETTING: "the prefix cache is being reset",
    NO_TRANSFER_PROCESS: "the transfer process ended and is being restarted",
    ALONE: "the prefix cache was reset and the weights version is not set",
    NO_PEERS: "no other replica in this namespace",
}


class SharingLog:
    """Logs transitions, beginning with the first time that sharing works."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._works = False

    def update(self, reason: str | None, peers: int) -> None:
        """`reason` is why the replica does not share, None if it does, with `peers` peers."""
        if self._works == (reason is None):
            return
        self._works = reason is None
        if reason is None:
            logger.info("sharing works: incarnation=%s peers=%d", self._incarnation, peers)
        else:
            logger.warning(
                "sharing stopped, %s: incarnation=%s", _EXPLAINED[reason], self._incarnation
            )

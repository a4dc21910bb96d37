"""One line in the log when a replica's sharing begins to work, and one when it stops."""

from __future__ import annotations

import logging

from xinference_xavier.errors import NotSharing

logger = logging.getLogger(__name__)

_EXPLAINED = {
    NotSharing.NO_PREFIX_CACHING: "prefix caching is off",
    NotSharing.SWITCHED_OFF: "switched off by an operator",
    NotSharing.NOT_JOINED: "no tracker found yet",
    NotSharing.RESETTING: "the prefix cache is being reset",
    NotSharing.NO_TRANSFER_PROCESS: "the transfer process ended and is being restarted",
    NotSharing.ALONE: "the prefix cache was reset and the weights version is not set",
    NotSharing.NOT_COMPARED: "no peer has computed the same chunk yet, or none equally",
    NotSharing.NO_PEERS: "no other replica in this namespace",
}


class SharingLog:
    """Logs transitions, beginning with the first time that sharing works."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._works = False

    def update(self, reason: NotSharing | None, peers: int) -> None:
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

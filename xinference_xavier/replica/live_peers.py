"""Which peers a donor treats as alive. Runs on the event loop of the tracker's client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LivePeers:
    """Reports the live peers whenever they change.

    A new tracker does not know the peers that have not joined it yet. They count as alive for one
    lease after it appeared, unless it saw them leave.
    """

    def __init__(self, on_members: Callable[[frozenset[str]], None]) -> None:
        self._on_members = on_members
        self._alive: frozenset[str] = frozenset()
        self._seen: frozenset[str] = frozenset()
        self._epoch = ""
        self._grace_until = 0.0

    def start(self, epoch: str, lease: float) -> None:
        """Begin a session with the tracker's index `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._seen = epoch, frozenset()
            self._grace_until = asyncio.get_running_loop().time() + lease

    def update(self, peers: frozenset[str]) -> None:
        """Take over `peers`, the members that the tracker reports."""
        departed, self._seen = self._seen - peers, self._seen | peers
        in_grace = asyncio.get_running_loop().time() < self._grace_until
        self._set_alive(peers | (self._alive - departed) if in_grace else peers)

    def clear(self) -> None:
        """The replica leaves its peers."""
        self._seen, self._epoch = frozenset(), ""
        self._set_alive(frozenset())

    def _set_alive(self, alive: frozenset[str]) -> None:
        if alive != self._alive:
            self._alive = alive
            self._on_members(alive)

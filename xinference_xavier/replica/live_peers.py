"""Which peers a donor takes for alive. For one event loop, that of the tracker's client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LivePeers:
    """Tells the replica which peers to take for alive.

    A new tracker does not know the peers that have not joined it yet: they count as alive for one
    lease after it appeared, unless it saw them go.
    """

    def __init__(self, on_members: Callable[[frozenset[str]], None]) -> None:
        self._on_members = on_members
        self._alive: frozenset[str] = frozenset()
        self._seen: frozenset[str] = frozenset()
        self._epoch = ""
        self._grace_until = 0.0

    def start(self, epoch: str, lease: float) -> None:
        """A session with the tracker's index `epoch` begins."""
        if epoch != self._epoch:
            self._epoch, self._seen = epoch, frozenset()
            self._grace_until = asyncio.get_running_loop().time() + lease

    def see(self, peers: frozenset[str]) -> None:
        """The tracker says that `peers` are members."""
        departed, self._seen = self._seen - peers, self._seen | peers
        in_grace = asyncio.get_running_loop().time() < self._grace_until
        self._notify(peers | (self._alive - departed) if in_grace else peers)

    def clear(self) -> None:
        """The replica leaves its peers."""
        self._seen, self._epoch = frozenset(), ""
        self._notify(frozenset())

    def _notify(self, alive: frozenset[str]) -> None:
        if alive != self._alive:
            self._alive = alive
            self._on_members(alive)

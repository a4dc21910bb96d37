"""Sets of peers as integers: each peer has a number, and a set has their bits.

Threading: any thread may read; one thread writes. Once a peer has left, its number is another's, so
a set that was read before may name the wrong peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set

MAX_SHARED = 100_000
"""Sets that are one object wherever they are held; beyond them each holder has its own."""


class PeerSets:
    def __init__(self) -> None:
        self.version = 0
        """Changes whenever a number is given or freed."""
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []  # by number
        self._free: deque[int] = deque()  # numbers of peers that have left
        self._shared: dict[int, int] = {}

    def __contains__(self, peer: str) -> bool:
        return peer in self._numbers

    @property
    def peers(self) -> Set[str]:
        return self._numbers.keys()

    @property
    def size(self) -> int:
        """All numbers are below it."""
        return len(self._names)

    def bit(self, peer: str) -> int:
        """The set of this peer alone, which may be a new one."""
        if peer not in self._numbers:
            if self._free:
                number = self._free.popleft()
                self._names[number] = peer
            else:
                number = len(self._names)
                self._names.append(peer)
            self._numbers[peer] = number
            self.version += 1
        return 1 << self._numbers[peer]

    def set_of(self, peers: Iterable[str]) -> int:
        """Ignores peers without a number."""
        found = 0
        for peer in peers:
            number = self._numbers.get(peer)
            if number is not None:
                found |= 1 << number
        return found

    def names(self, peers: int) -> list[str]:
        """Those that are known here: the set may be older than this object."""
        names, found = self._names, []
        while peers:
            number = peers.bit_length() - 1
            if number < len(names):
                found.append(names[number])
            peers ^= 1 << number
        return found

    def shared(self, peers: int) -> int:
        """The same set as one object: with a thousand peers, each takes 160 bytes."""
        if len(self._shared) >= MAX_SHARED:
            return self._shared.get(peers, peers)
        return self._shared.setdefault(peers, peers)

    def forget(self, peers: Iterable[str]) -> None:
        """They have left, and no set has them any more."""
        gone = self.set_of(peers)
        self.version += 1
        for peer in peers:
            self._free.append(self._numbers.pop(peer))
        self._shared = {held: held for held in self._shared if not held & gone}

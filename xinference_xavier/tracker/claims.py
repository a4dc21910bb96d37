"""Who is computing which chunks, so that one replica does and the others wait for it.

`Claims` is the tracker's side, one per namespace: a pure data structure like the index, with time
passed in, in monotonic seconds. `Claim` is what the request of a replica holds in its hands.

A claim is a hint, like all that the tracker knows. It ends when its chunks are published, when the
request that made it ends, when its replica is lost, and by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_CLAIMED = 100_000
"""Chunks of one namespace; beyond them nobody waits for anybody."""


class _Owner(NamedTuple):
    incarnation: str
    until: float


class Claims:
    """`refused` counts the keys that there was no room for."""

    def __init__(self) -> None:
        self.refused = 0
        self._owners: dict[bytes, _Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def claim(self, incarnation: str, keys: Sequence[bytes], now: float, seconds: float) -> int:
        """Make the keys of a prefix, in their order, `incarnation`'s for so many seconds and return
        0; or leave all as it is and return how many of the first ones a peer computes or has.

        A key stands for all before it, so a peer that computes one has those, or knows who does.
        """
        first = next((key for key in keys if self._is_others(key, incarnation, now)), None)
        if first is not None:
            owner = self._owners[first].incarnation
            return 1 + max(place for place, key in enumerate(keys) if self._is_of(key, owner))
        if len(self._owners) + len(keys) > MAX_CLAIMED:
            self._expire(now)
        if len(self._owners) + len(keys) > MAX_CLAIMED:
            self.refused += len(keys)
        else:
            self._owners |= dict.fromkeys(keys, _Owner(incarnation, now + seconds))
        return 0

    def release(self, incarnation: str, keys: Iterable[bytes]) -> None:
        """They are published, or will not be."""
        for key in keys:
            if self._is_of(key, incarnation):
                del self._owners[key]

    def forget(self, incarnation: str) -> None:
        """The replica is gone."""
        self._owners = {
            key: owner for key, owner in self._owners.items() if owner.incarnation != incarnation
        }

    def _expire(self, now: float) -> None:
        self._owners = {key: owner for key, owner in self._owners.items() if now < owner.until}

    def _is_of(self, key: bytes, incarnation: str) -> bool:
        owner = self._owners.get(key)
        return owner is not None and owner.incarnation == incarnation

    def _is_others(self, key: bytes, incarnation: str, now: float) -> bool:
        owner = self._owners.get(key)
        return owner is not None and owner.incarnation != incarnation and now < owner.until

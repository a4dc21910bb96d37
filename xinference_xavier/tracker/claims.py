"""The claims of one namespace: chunks that a replica is computing, so that others wait instead.

A claim is a hint. It ends when its chunks are published, when the request that made it ends, when
its replica is lost, and when its time is up. Pure: the time is passed in, in monotonic seconds.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_CLAIMED = 100_000
"""Chunks of one namespace; beyond them no replica waits for another."""


class _Claim(NamedTuple):
    incarnation: str
    until: float


class Claims:
    """At most `MAX_CLAIMED` keys are claimed at a time."""

    def __init__(self) -> None:
        self._claims: dict[bytes, _Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, incarnation: str, keys: Sequence[bytes], now: float, seconds: float) -> int:
        """Claim the ordered `keys` of a prefix for `seconds` and return 0; or change nothing and
        return how many leading keys a peer is computing or has computed.

        A key stands for its whole prefix: a peer that computes one chunk has its predecessors, or
        fetches them.
        """
        for owner, until in filter(None, map(self._claims.get, keys)):
            if owner != incarnation and now < until:
                return max(count for count, key in enumerate(keys, 1) if self._is_of(key, owner))
        if len(self._claims) + len(keys) > MAX_CLAIMED:
            self._expire(now)
        if len(self._claims) + len(keys) <= MAX_CLAIMED:
            self._claims |= dict.fromkeys(keys, _Claim(incarnation, now + seconds))
        return 0

    def release(self, incarnation: str, keys: Iterable[bytes]) -> None:
        """End the claims of `incarnation` on `keys`."""
        for key in keys:
            if self._is_of(key, incarnation):
                del self._claims[key]

    def forget(self, incarnation: str) -> None:
        """End all claims of `incarnation`."""
        self._claims = {
            key: claim for key, claim in self._claims.items() if claim.incarnation != incarnation
        }

    def _expire(self, now: float) -> None:
        self._claims = {key: claim for key, claim in self._claims.items() if now < claim.until}

    def _is_of(self, key: bytes, incarnation: str) -> bool:
        return key in self._claims and self._claims[key].incarnation == incarnation

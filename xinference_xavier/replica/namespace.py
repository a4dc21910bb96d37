"""The namespace in which a replica shares, from one reset of its weights to the next.

Threading: the scheduler thread announces a reset; all else belongs to the replica's event loop.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable


class SharedNamespace:
    """`own` is the digest of what the engine computes with; `move` leaves the namespace before for
    the one it is given, and returns when no peer of the former is known here any more."""

    def __init__(self, own: str, move: Callable[[str], Awaitable[None]]) -> None:
        self.current = own
        self.is_ours_alone = False
        """Since a reset, until somebody says which version our weights are."""
        self._own = own
        self._move = move
        self._moving = asyncio.Lock()
        self._announced = 0  # resets
        self._done = 0

    @property
    def is_settled(self) -> bool:
        """Whether the last reset is through."""
        return self._done == self._announced

    def announce_reset(self) -> None:
        """From now on nothing is shared until `part` is through. By the scheduler thread."""
        self._announced += 1

    async def isolate(self) -> None:
        """Share in a namespace of our own from now on; once for each announced reset.

        Peers may hold bytes that were computed with weights that are ours no longer, and nobody
        can tell which.
        """
        async with self._moving:
            await self._change(f"{self._own}+{secrets.token_hex(8)}")
            self.is_ours_alone = True
            self._done += 1

    async def rejoin(self, version: str) -> bool:
        """Share again with those of the same version; what was computed since the last reset is
        of it. False if there was no reset: then everything here is as old as it was."""
        async with self._moving:
            if not self.is_ours_alone:
                return False
            self.is_ours_alone = False
            await self._change(f"{self._own}@{version}")
            return True

    async def _change(self, namespace: str) -> None:
        self.current = namespace
        await self._move(namespace)

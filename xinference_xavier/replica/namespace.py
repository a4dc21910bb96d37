"""The namespace in which a replica shares, from one reset of its prefix cache to the next.

Threading: the scheduler thread announces resets; everything else runs on the replica's event loop.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable

from xinference_xavier.protocol.tracker import MAX_WEIGHTS_VERSION


class SharedNamespace:
    """`own` is the digest of what the engine computes with. `move` changes to another namespace; it
    returns when the replica has forgotten the peers of the former one."""

    def __init__(self, own: str, move: Callable[[str], Awaitable[None]]) -> None:
        self.current = own
        self._own = self._base = own
        self.lasting: str | None = own
        """What engines with these weights have in common, also after a restart. None since a reset,
        until an operator sets the weights version."""
        self._move = move
        self._moving = asyncio.Lock()
        self.announced = 0  # resets
        self._done = 0
        self.parts = 0
        """How often we have left peers that compute different rows, since the last reset."""

    @property
    def is_settled(self) -> bool:
        """Whether all announced resets are done."""
        return self._done == self.announced

    def announce_reset(self) -> None:
        """Stop sharing until `isolate` is done. Called by the scheduler thread."""
        self.announced += 1

    async def isolate(self) -> None:
        """Move to a namespace of our own, after all resets that are announced by now.

        Peers may hold bytes that our former weights computed, and nothing tells these apart. A
        change of weights may be a thousand calls, and as many resets.
        """
        async with self._moving:
            announced = self.announced
            if self._done < announced:
                self.lasting = None
                await self._begin(f"{self._own}+{secrets.token_hex(8)}")
                self._done = announced

    async def rejoin(self, version: str, resets: int) -> bool:
        """Share with the replicas of weights `version`, to which everything computed since the last
        of so many resets belongs. False, and no change, without a reset, when our chunks may be
        older, and after one more."""
        async with self._moving:
            if self.lasting is not None or self.announced != resets:
                return False
            if not 0 < len(version) <= MAX_WEIGHTS_VERSION:  # vLLM takes any text
                version = hashlib.sha256(version.encode()).hexdigest()
            self.lasting = f"{self._own}@{version}"
            await self._begin(self.lasting)
            return True

    async def part(self, namespace: str) -> None:
        """Leave peers that compute different rows in `namespace`, unless that is done: move to the
        next one of a series."""
        async with self._moving:
            if namespace != self.current:
                return
            self.parts += 1
            await self._change(f"{self._base}~{self.parts}")

    async def _begin(self, namespace: str) -> None:
        self._base, self.parts = namespace, 0
        await self._change(namespace)

    async def _change(self, namespace: str) -> None:
        self.current = namespace
        await self._move(namespace)

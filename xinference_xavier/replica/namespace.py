"""The namespace in which a replica shares, from one reset of its prefix cache to the next.

Threading: the scheduler thread announces resets; everything else runs on the replica's event loop.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.tracker import MAX_WEIGHTS_VERSION, SPLIT
from xinference_xavier.replica.disk import Disk


class SharedNamespace:
    """`digest` is that of what the engine computes with. With each change the session with the
    tracker ends, the index forgets the peers of the former one, and the disk its store."""

    def __init__(self, digest: str, index: Index[Peers], disk: Disk) -> None:
        self.current = digest
        self._digest = digest
        self.durable: str | None = digest
        """What engines with these weights have in common, also after a restart. None since a reset,
        until an operator sets the weights version."""
        self._index = index
        self._disk = disk
        self._session: asyncio.Task[None] | None = None
        self._moving = asyncio.Lock()
        self.announced = 0  # resets
        self._done = 0
        disk.move(digest)

    @property
    def resets_done(self) -> bool:
        """True if all announced resets are done."""
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
                self.durable = None
                await self._change(f"{self._digest}+{secrets.token_hex(8)}")
                self._done = announced

    async def rejoin(self, version: str, resets: int) -> bool:
        """Share with the replicas of weights `version`, to which everything computed since the last
        of so many resets belongs. False, and no change, without a reset, when our chunks may be
        older, and after one more."""
        async with self._moving:
            if self.durable is not None or self.announced != resets:
                return False
            # vLLM takes any text.
            if not 0 < len(version) <= MAX_WEIGHTS_VERSION or SPLIT in version:
                version = hashlib.sha256(version.encode()).hexdigest()
            self.durable = f"{self._digest}@{version}"
            await self._change(self.durable)
            return True

    async def part(self, namespace: str, to: str) -> None:
        """Leave `namespace`, unless that is done: those that compute the same are in another."""
        async with self._moving:
            if namespace == self.current:
                await self._change(to)

    async def run_session(self, session: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Run `session` in the current namespace until it ends, or we change to another one."""
        self._session = asyncio.create_task(session(self.current))
        try:
            await asyncio.wait({self._session})
        finally:
            await self.end_session()

    async def end_session(self) -> None:
        if self._session is not None and not self._session.done():
            self._session.cancel()
            await asyncio.wait({self._session})

    async def _change(self, namespace: str) -> None:
        self.current = namespace
        self._disk.move(self.durable)
        await self.end_session()
        self._index.clear()

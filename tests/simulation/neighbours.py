"""Peers on the simulated replica's host. It loads their rows from where they are.

Their pools and grants are real, and so is the window that they are mapped to. A row that is not
granted may be overwritten at any time, and is as soon as its grant ends: a load that is still under
way reads noise.
"""

import mmap
import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from xinference_xavier.peers import Peers
from xinference_xavier.pool import window
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import Memory, Region
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest
from xinference_xavier.replica.donor import Grants
from xinference_xavier.replica.neighbours import Neighbour, Neighbours

CONSUMER = "own"
_LIFETIME = 1.0
"""Seconds. Nobody copies what is granted here."""


def garble(row: Memory, rng: random.Random) -> None:
    row[:] = np.frombuffer(rng.randbytes(len(row)), dtype=np.uint8)


class Window(window.Window):
    """It has zeros where nothing is mapped: what reads them is noticed, and does not end the
    process."""

    def _map(self, address: int | None, rows: int, access: int, fd: int) -> int:
        return super()._map(address, rows, access or mmap.PROT_READ, fd)

    def close(self) -> None:
        """The regions' memory goes; nothing may use it any more."""
        self.unmap(0, self.rows)


class Lender:
    """A peer's process, and the consumer's connection to it, which ends with it."""

    def __init__(self, slots: int, row_bytes: int, rng: random.Random) -> None:
        self.region = Region.create(slots, row_bytes)
        self.pool = Pool(slots)
        self.grants = Grants(self.pool, max(1, slots // 2), _LIFETIME, {CONSUMER})
        self.has_ended = False
        self._rng = rng

    def grant(
        self,
        request: GrantRequest,
        held: Collection[bytes],
        write: Callable[[Memory, bytes], None],
        now: float,
    ) -> Grant:
        """It stores what it holds only now that somebody wants it."""
        self._check_alive()
        for row in self.pool.reserve(key for key in request.keys if key in held).rows:
            write(self.region.row(row.slot), row.key)
            self.pool.commit(row, self.region.checksum(row.slot, row.key))
        record = self.grants.grant(request, now)
        return Grant(
            tuple(row.slot for row in record.rows),
            tuple(row.checksum for row in record.rows if row.checksum is not None),
            record.expires,
            Endpoint("127.0.0.1:1"),
            more_is_held=len(record.rows) < len(request.keys),
            sequence=0,
        )

    def release(self, number: int) -> None:
        self._check_alive()
        self.grants.release(CONSUMER, number)
        self.store_others()

    def go_on(self, now: float) -> None:
        """The consumer may have stood still for long, and may be no member any more."""
        self.grants.expire(now)
        self.grants.release_except(frozenset())
        self.store_others()

    def flush(self) -> None:
        self.pool.flush(self.pool.rows())
        self.store_others()

    def reset(self) -> None:
        self.pool.reset()
        self.store_others()

    def store_others(self) -> None:
        """Take all slots that are not granted for other chunks."""
        if self.has_ended:
            return
        rows = self.pool.reserve(self._rng.randbytes(8) for _ in range(self.pool.slots)).rows
        for row in rows:
            garble(self.region.row(row.slot), self._rng)
        self.pool.abort(*rows)

    def _check_alive(self) -> None:
        if self.has_ended:
            raise ConnectionResetError("its process has ended")

    # -- the connection -----------------------------------------------------------------------

    def recv(self, _: int) -> bytes:
        if not self.has_ended:
            raise BlockingIOError
        return b""

    def close(self) -> None:
        self.region.close()


class Neighbourhood(Neighbours):
    """`connect` returns the process of a peer, or raises OSError. Here one window serves both the
    engine and its worker, so there is nothing to order."""

    def __init__(self, window: Window, peers: Peers, connect: Callable[[str], Lender]) -> None:
        super().__init__(window, peers, workers=0, enabled=True)
        self._connect = connect

    async def _mapping(self, name: str) -> Neighbour:
        lender = self._connect(name)
        first, rows = self._room(lender.region.rows), lender.region.rows
        self.window.map(first, lender.region)
        connection: Any = lender
        return Neighbour(name, first, rows, connection)

    @property
    def loans(self) -> int:
        return sum(each.loans for each in self._mapped.values())

    async def look(self) -> None:
        await self._look()


class Actor:
    """How a peer is asked. It answers whenever it gets to that, and first to whichever question."""

    def __init__(self, grant: Callable[..., Any], release: Callable[..., Any]) -> None:
        self.grant, self._release = grant, release

    async def release(self, consumer: str, number: int) -> None:
        assert consumer == CONSUMER
        await self._release(number)

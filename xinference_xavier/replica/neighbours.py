"""Neighbours: the peers on this host whose pools this replica's workers have mapped.

A chunk that a neighbour holds is loaded in place. The donor grants its rows, and vLLM loads them
from where they are. If the engine can map a pool and its workers cannot, its rows are copied, as
are those of a hand-over.

A replica keeps a connection to each neighbour, and only the kernel closes it: when the donor's
process ends, and its pool is to be unmapped (`Neighbours`), or the consumer's, and nothing loads
what was granted to it any more (`Lending`). Neither depends on the tracker, nor on who is a member.

Each pool costs page tables in every worker, a 512th of its size; with a device, its driver pins it
there, too. If the engine cannot map it, either, the peer is fetched from like one elsewhere.

Threading: the replica's background loop; copies are made by threads. Connections outlive it: vLLM
may still load something.
"""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xinference_xavier.errors import RegionError, XavierError
from xinference_xavier.limits import CALL_DEADLINE, MOST_PAUSE, START_DEADLINE, TICK
from xinference_xavier.peers import IN_PLACE, SHARED_MEMORY, Peers
from xinference_xavier.pool.pool import Row
from xinference_xavier.pool.region import check_same_user, checksum, receive_region, socket_name
from xinference_xavier.pool.window import DONE, Order, Window, worker_name
from xinference_xavier.protocol.transfer import PullResult, check_slots
from xinference_xavier.runtime.aio import Rollback, in_thread, spawn, to_its_end, within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

_MAPPED_PER_SECOND = 1 << 30  # bytes; slow drivers take as long
_LENDS = "lends"
_ELSEWHERE = "not on this host, or in another network namespace"


class Lending:
    """The donor's end: who may borrow rows, each with a connection."""

    def __init__(self, incarnation: str) -> None:
        self._name = socket_name(f"{incarnation}-{_LENDS}")
        self.borrowers: dict[str, asyncio.StreamWriter] = {}
        self._log = RateLimitedLog(logger)

    async def open(self, ended: Callable[[str], None]) -> asyncio.Server:
        """`ended` is called with the incarnation of a borrower whose process is gone."""

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            spawn(self._keep(ended, reader, writer))

        return await asyncio.start_unix_server(connected, self._name)

    async def _keep(
        self,
        ended: Callable[[str], None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        borrower = ""
        with closing(writer):
            try:
                check_same_user(writer.get_extra_info("socket"))
                borrower = (await within(CALL_DEADLINE, reader.readline())).decode().strip()
                self.borrowers[borrower] = writer
                writer.write(DONE)
                await reader.read()  # until it ends
            except (OSError, RegionError, TimeoutError, ValueError) as error:
                self._log.warn("borrower", "a neighbour's connection ended: error=%s", error)
            finally:
                if self.borrowers.get(borrower) is writer:
                    del self.borrowers[borrower]
                    ended(borrower)


@dataclass(eq=False)
class Neighbour:
    """A peer's pool, mapped to `rows` slot numbers from `first` on, in the workers, too, once it is
    `in_place`. `loans` are the fetches whose rows may still be loaded or copied: it stays mapped
    meanwhile."""

    name: str
    first: int
    rows: int
    connection: socket.socket
    in_place: bool = False
    loans: int = 0

    @property
    def is_gone(self) -> bool:
        """True once its process has ended."""
        try:
            return not self.connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True


class _Obstacle(NamedTuple):
    reason: str
    until: float  # then it is tried again


class Neighbours:
    """Maps the pools of peers that join, and unmaps those of processes that have ended."""

    def __init__(self, window: Window, peers: Peers, workers: int, enabled: bool) -> None:
        """The engine has so many `workers`. Not `enabled`, there are no neighbours."""
        self.window = window
        self._peers = peers
        self._workers = workers
        self._enabled = enabled
        self._mapped: dict[str, Neighbour] = {}
        self._obstacles: dict[str, _Obstacle] = {}

    def get(self, name: str) -> Neighbour | None:
        return self._mapped.get(name)

    @property
    def mapped_bytes(self) -> int:
        rows = (each.rows for each in [*self._mapped.values()] if each.in_place)
        return sum(rows) * self.window.row_bytes

    @property
    def obstacles(self) -> dict[str, str]:
        """Why nothing is loaded in place from a peer."""
        return {name: obstacle.reason for name, obstacle in self._obstacles.items()}

    @property
    def linked_to(self) -> dict[str, str]:
        """How the rows of each neighbour come."""
        mapped = self._mapped.items()
        return {name: IN_PLACE if each.in_place else SHARED_MEMORY for name, each in mapped}

    def checksum(self, slot: int, key: bytes) -> int:
        return checksum(self.window.array[slot].data, key)

    def is_settled(self, name: str) -> bool:
        """True once it is known whether this peer's rows are loaded in place."""
        return not self._enabled or name in self._obstacles or self.lends(name)

    def lends(self, name: str) -> bool:
        """True if rows of this peer are loaded in place."""
        neighbour = self._mapped.get(name)
        return neighbour is not None and neighbour.in_place

    def copy(
        self,
        neighbour: Neighbour,
        rows: Sequence[Row],
        granted: Sequence[int],
        checksums: Sequence[int],
        deadline: float,
    ) -> Awaitable[PullResult]:
        """Copy the rows in the neighbour's slots `granted` to our `rows`, in order. When what is
        returned has ended, nothing writes to them any more, even if it was cancelled. Raises
        LinkError: a slot is outside of the neighbour's pool."""
        check_slots(granted, neighbour.rows)
        pairs = [*zip(rows, granted, checksums, strict=True)]

        def copied() -> PullResult:
            own = self.window.own
            for done, (row, slot, expected) in enumerate(pairs):
                if time.monotonic() > deadline:
                    return PullResult(done, "timeout", SHARED_MEMORY)
                np.copyto(own.row(row.slot), self.window.array[neighbour.first + slot])
                if own.checksum(row.slot, row.key) != expected:
                    return PullResult(done, "checksum", SHARED_MEMORY)
            return PullResult(len(pairs), None, SHARED_MEMORY)

        def ended(_: object) -> None:
            neighbour.loans -= 1

        neighbour.loans += 1
        copying = in_thread(copied)
        copying.add_done_callback(ended)
        return to_its_end(copying)

    async def run(self) -> None:
        """Go on until cancelled."""
        while self._enabled:
            await self._look()
            await asyncio.sleep(TICK)

    async def _look(self) -> None:
        for each in [*self._mapped.values()]:
            if each.is_gone and not each.loans:
                await self._unmap(each)
        names, now = {*self._peers}, time.monotonic()
        self._obstacles = {name: each for name, each in self._obstacles.items() if name in names}
        for name in names:
            obstacle = self._obstacles.get(name)
            if not self.lends(name) and (obstacle is None or now >= obstacle.until):
                await self._map(name)
        # A peer's record may be a new one.
        for each in self._mapped.values():
            self._peers.map(each.name, each.first if each.in_place and not each.is_gone else None)

    async def _map(self, name: str) -> None:
        """Map the peer's pool for the engine, then for its workers."""
        began = time.monotonic()
        try:
            if name not in self._mapped:
                self._mapped[name] = await self._mapping(name)
            neighbour = self._mapped[name]
            await self._lend(neighbour)
        except ConnectionRefusedError:
            reason = _ELSEWHERE
        except (XavierError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if self.obstacles.get(name) != reason:
                logger.warning("rows of this peer are copied: peer=%s error=%s", name, reason)
        else:
            self._obstacles.pop(name, None)
            size, seconds = neighbour.rows * self.window.row_bytes, time.monotonic() - began
            logger.info("pool of a neighbour mapped: peer=%s bytes=%d s=%.1f", name, size, seconds)
            return
        self._obstacles[name] = _Obstacle(reason, time.monotonic() + MOST_PAUSE)

    async def _mapping(self, name: str) -> Neighbour:
        async with Rollback() as scope:
            connection = await in_thread(_connect, name, self._peers.incarnation)
            scope.undo(connection.close)
            region = await in_thread(receive_region, name, CALL_DEADLINE)
            with closing(region):
                first, rows = self._room(region.rows), region.rows
                self.window.map(first, region)
            scope.commit()
        return Neighbour(name, first, rows, connection)

    async def _lend(self, neighbour: Neighbour) -> None:
        first, rows = neighbour.first, neighbour.rows
        seconds = START_DEADLINE + rows * self.window.row_bytes / _MAPPED_PER_SECOND
        async with Rollback() as scope:
            scope.undo(self._order, Order(first, rows), CALL_DEADLINE)
            await self._order(Order(first, rows, neighbour.name), seconds)
            scope.commit()
        neighbour.in_place = True

    def _room(self, rows: int) -> int:
        """The first row behind which there are so many that nothing is mapped to."""
        first = self.window.room_from(self.window.own.rows, rows)
        for each in sorted(self._mapped.values(), key=lambda each: each.first):
            if first + rows <= each.first:
                break
            first = self.window.room_from(each.first + each.rows, rows)
        return first

    async def _unmap(self, neighbour: Neighbour) -> None:
        """Its memory is free once nobody has it mapped any more, so it is remembered until then."""
        first, rows = neighbour.first, neighbour.rows
        self._peers.map(neighbour.name, None)
        if neighbour.in_place:
            try:
                await self._order(Order(first, rows), CALL_DEADLINE)
            except (RegionError, OSError, TimeoutError) as error:
                logger.warning("pool is still mapped: peer=%s error=%r", neighbour.name, error)
                return
        del self._mapped[neighbour.name]
        neighbour.connection.close()
        self.window.unmap(first, rows)

    async def _order(self, order: Order, seconds: float) -> None:
        """Have all workers obey. Raises RegionError, OSError, TimeoutError."""
        obeying = (self._obeyed(rank, order) for rank in range(self._workers))
        await within(seconds, asyncio.gather(*obeying))

    async def _obeyed(self, rank: int, order: Order) -> None:
        name = worker_name(self._peers.incarnation, rank)
        try:
            reader, writer = await asyncio.open_unix_connection(socket_name(name))
        except ConnectionRefusedError:
            raise RegionError("a worker takes no orders") from None
        with closing(writer):
            writer.write(json.dumps(order._asdict()).encode() + b"\n")
            answer = await reader.read()
        if answer != DONE:
            raise RegionError(answer.decode() or "a worker did not answer")


def _connect(donor: str, consumer: str) -> socket.socket:
    """Be known to the donor as one that may borrow its rows. Raises OSError, RegionError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CALL_DEADLINE)
        connection.connect(socket_name(f"{donor}-{_LENDS}"))
        check_same_user(connection)
        connection.sendall(consumer.encode() + b"\n")
        if connection.recv(len(DONE), socket.MSG_WAITALL) != DONE:
            raise RegionError("it lends nothing")
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection

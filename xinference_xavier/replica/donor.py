"""The donor's side of a fetch in the engine: checksums and grants.

No row is offered without its checksum; a grant keeps rows in place for a consumer.

Threading: the replica's background loop, so that answers do not wait for the engine. Checksums are
computed on a thread of their own, which releases the GIL, while the rows are pinned. `Grants` is
pure bookkeeping over the pool's pins; time is passed in.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from xinference_xavier.errors import GrantRefusedError
from xinference_xavier.limits import TICK
from xinference_xavier.peers import Peers
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import Grant, GrantRequest, check_request
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.kept_prefixes import Prompt
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.neighbours import Lending
from xinference_xavier.replica.reports import Publisher
from xinference_xavier.replica.transfer_process import TransferProcess

_BATCH = 16  # rows


class Checksums:
    """Computes the checksums of stored chunks, which are published when they have theirs."""

    def __init__(self, region: Region, pool: Pool, publisher: Publisher) -> None:
        self._region = region
        self._pool = pool
        self._publisher = publisher
        # By slot: a new row replaces an evicted one, so there are never more than slots.
        self._waiting: dict[int, Row] = {}
        self._work = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "xavier-checksum")

    def add(self, rows: Sequence[Row]) -> None:
        self._waiting.update((row.slot, row) for row in rows)
        self._work.set()

    async def run(self) -> None:
        """Compute checksums until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            batch = [self._waiting.pop(slot) for slot in list(islice(self._waiting, _BATCH))]
            if not self._waiting:
                self._work.clear()
            pinned = [row for row in batch if self._pool.pin_row(row)]
            try:
                checksums = await loop.run_in_executor(self._thread, self._checksum, pinned)
                # Without an await between the two, so that a withdrawal can only follow the offer.
                pairs = zip(pinned, checksums, strict=True)
                offered = [row.key for row, c in pairs if self._pool.set_checksum(row, c)]
                self._publisher.enqueue(offered, held=True)
            finally:
                self._pool.unpin(pinned)

    def _checksum(self, rows: Sequence[Row]) -> list[int]:
        return [self._region.checksum(row.slot, row.key) for row in rows]


class Donor:
    """Grants while less than half of the pool is granted. A grant of rows to be copied lasts
    `lifetime` seconds."""

    def __init__(
        self,
        pool: Pool,
        peers: Peers,
        disk: Disk,
        process: TransferProcess,
        namespace: SharedNamespace,
        publisher: Publisher,
        finished: deque[Prompt],
        lifetime: float,
    ) -> None:
        """`finished` gets what neighbours load, like the prompts of own requests."""
        self._pool = pool
        self._peers = peers
        self._disk = disk
        self._process = process
        self._namespace = namespace
        self._publisher = publisher
        self._finished = finished
        self.lending = Lending(peers.incarnation)
        self.grants = Grants(pool, max(1, pool.slots // 2), lifetime, self.lending.borrowers)

    async def run(self) -> None:
        """End grants that are over, and what connects us with replicas that are no peers any more,
        until cancelled. One may open a link after its lease has expired, before it knows."""
        while True:
            await asyncio.sleep(TICK)
            self.grants.expire(time.monotonic())
            peers = frozenset(self._peers)
            # Links first: while a link is open, granted rows may be in flight.
            await self._process.close_links_except(peers)
            self.grants.release_except(peers)

    def grant(self, request: GrantRequest) -> Grant:
        """Grant the leading chunks of the request that we hold, which counts as their use. Raises
        GrantRefusedError; LinkError for another version."""
        endpoint = self._process.endpoint
        check_request(request)
        if not (self._namespace.resets_done and self._peers.enabled):
            raise GrantRefusedError("sharing is off")
        if request.namespace != self._namespace.current:
            raise GrantRefusedError("other namespace")
        if not self._peers.may_fetch(request.consumer):  # it may not know that we were reset
            raise GrantRefusedError("not compared")
        if endpoint is None or not self._process.ready:
            raise GrantRefusedError("no transfer process")
        record = self.grants.grant(request, time.monotonic())
        held = len(record.rows)
        if request.in_place:
            self._finished.append(request.keys[:held])
        else:
            self._disk.used(request.keys[:held])
        beyond = request.keys[held : held + 1]
        return Grant(
            slots=tuple(row.slot for row in record.rows),
            checksums=tuple(row.checksum for row in record.rows if row.checksum is not None),
            expires=record.expires,
            endpoint=endpoint,
            more_is_held=any(self._pool.lookup(key) is not None for key in beyond),
            sequence=self._publisher.last_sequence,
        )


class GrantRecord(NamedTuple):
    rows: list[Row]
    in_place: bool
    expires: float


_Name = tuple[str, int]
"""A consumer, and its number for the grant."""


class Grants:
    """Grants further rows while fewer than `max_rows` are granted.

    Rows that are copied are granted for `lifetime` seconds, and as long as the consumer is a
    member: as many as there is room for, since the rest can follow. A load in place gets all that
    it asks for, as it keeps them until its end. It cannot be stopped, so its rows stay until they
    are released or the borrower's process has ended.
    """

    def __init__(
        self, pool: Pool, max_rows: int, lifetime: float, borrowers: Container[str]
    ) -> None:
        """Only `borrowers` load in place: it is noticed when they end."""
        self._pool = pool
        self._max_rows = max_rows
        self._lifetime = lifetime
        self._borrowers = borrowers
        self._records: dict[_Name, GrantRecord] = {}
        self._given_up: dict[str, int] = {}  # by borrower: a request may arrive after its release
        self._granted = Counter[Row]()

    @property
    def granted_rows(self) -> int:
        """A row counts once: many consumers load what is hot."""
        return len(self._granted)

    def __len__(self) -> int:
        return len(self._records)

    def grant(self, request: GrantRequest, now: float) -> GrantRecord:
        """Pin the leading keys that we hold. Raises GrantRefusedError if too many rows are granted
        already, or nobody waits for these any more."""
        self.expire(now)
        consumer, number, in_place = request.consumer, request.number, request.in_place
        if in_place and consumer not in self._borrowers:
            raise GrantRefusedError("donor gone")
        if in_place and number <= self._given_up.get(consumer, -1):
            raise GrantRefusedError("reset")
        rows = self._pool.pin_shared(request.keys)
        room = self._max_rows - self.granted_rows
        new = [row for row in rows if row not in self._granted]
        if new and room <= 0:
            self._pool.unpin(rows)
            raise GrantRefusedError("busy")
        if not in_place and len(new) > room:
            end = rows.index(new[room])
            self._pool.unpin(rows[end:])
            rows = rows[:end]
        record = GrantRecord(rows, in_place, math.inf if in_place else now + self._lifetime)
        if rows:
            self._records[consumer, number] = record
            self._granted.update(rows)
        return record

    def release(self, consumer: str, number: int) -> None:
        """Unpin the rows of a grant, which may have ended already, or not begun."""
        record = self._records.pop((consumer, number), None)
        if record is not None:
            self._granted -= Counter(record.rows)
            self._pool.unpin(record.rows)
        elif consumer in self._borrowers:
            self._given_up[consumer] = max(number, self._given_up.get(consumer, -1))

    def expire(self, now: float) -> None:
        self._release_where(lambda _, record: record.expires <= now)

    def release_except(self, peers: frozenset[str]) -> None:
        """Release what replicas that are gone were to copy."""
        self._release_where(lambda consumer, record: not (record.in_place or consumer in peers))

    def borrower_ended(self, borrower: str) -> None:
        """Its process loads nothing any more."""
        self._release_where(lambda consumer, record: record.in_place and consumer == borrower)
        self._given_up.pop(borrower, None)

    def _release_where(self, ended: Callable[[str, GrantRecord], bool]) -> None:
        for name in [name for name, record in self._records.items() if ended(name[0], record)]:
            self.release(*name)

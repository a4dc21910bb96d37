"""A replica that fetches from its host's disk, or from what a test puts in its peers' place."""

import asyncio
import mmap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np

from tests.harness.comparisons import compared_index
from tests.harness.replicas import content
from xinference_xavier.disk_store import folder_of
from xinference_xavier.index import Index
from xinference_xavier.peers import DISK, Peers
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import Region
from xinference_xavier.pool.window import Window
from xinference_xavier.protocol.sketches import Sketch
from xinference_xavier.protocol.transfer import PullOrder, PullResult
from xinference_xavier.replica.disk import Disk, DiskState, NoDisk
from xinference_xavier.replica.fetcher import Fetch, Fetcher
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.neighbours import Neighbours
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.reports import Publisher

ROW_BYTES = 8192
FILE_BYTES = mmap.PAGESIZE + ROW_BYTES
ROWS = 16
NEVER = 60.0
CANARY: Sketch = {"layer": ("float32", [1.0, 2.0])}


class Consumer:
    """It fetches from `source`. Peers learn of what has `arrived`."""

    source: str

    def __init__(
        self,
        region: Region,
        pool: Pool,
        index: Index[Peers],
        pull: Callable[[PullOrder], Awaitable[PullResult]],
        disk: Disk | None = None,
    ) -> None:
        self.region, self.pool, self.index = region, pool, index
        disk = disk or NoDisk()
        self.namespace = SharedNamespace("namespace", index, disk)
        self.tier = PeerTier(pool, index, disk)
        self.arrived: list[bytes] = []
        self.rolled_back: list[str] = []
        self.publisher = publisher = Publisher(index.members.incarnation, pool)
        publisher.enqueue = lambda keys, held: self.arrived.extend(keys)  # type: ignore[method-assign,misc]
        process: Any = SimpleNamespace(pull=pull)
        self.neighbours = Neighbours(Window(region), index.members, workers=0, enabled=False)
        events: Any = SimpleNamespace(
            rolled_back=lambda source, reason, *_: self.rolled_back.append(reason)
        )
        self.fetcher = Fetcher(
            pool=pool,
            row_bytes=region.row_bytes,
            process=process,
            neighbours=self.neighbours,
            namespace=self.namespace,
            index=index,
            disk=disk,
            publisher=publisher,
            events=events,
            canary=Mock(),
        )

    def begin(
        self, keys: Sequence[bytes], seconds: float = NEVER
    ) -> tuple[Fetch, asyncio.Future[None]]:
        rows = self.pool.reserve(keys, redundant=None).rows
        for row in rows:
            row.origin = self.source
        fetch = Fetch(self.source, rows, time.monotonic() + seconds)
        return fetch, self.fetcher.start(fetch)

    async def fetch(self, keys: Sequence[bytes]) -> Fetch:
        fetch, fetching = self.begin(keys)
        await fetching
        return fetch

    def holds(self, keys: Sequence[bytes]) -> bool:
        """True if the pool has the right bytes of these chunks."""
        rows = [row for row in map(self.pool.lookup, keys) if row is not None]
        size = self.region.row_bytes
        right = (np.array_equal(self.region.row(r.slot), content(r.key, size)) for r in rows)
        return len(rows) == len(keys) and all(right)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(NEVER):
            while not condition():  # noqa: ASYNC110  # a thread tells nobody
                await asyncio.sleep(0.001)


def fill(region: Region, pool: Pool, keys: Sequence[bytes], **marks: Any) -> None:
    """Have an engine compute these chunks, in rows with these `marks`."""
    for row in pool.reserve(keys).rows:
        for name, value in marks.items():
            setattr(row, name, value)
        region.row(row.slot)[:] = content(row.key, region.row_bytes)
        pool.commit(row, region.checksum(row.slot, row.key))


class Life(Consumer):
    """A replica from a start to its end: its pool, and the disk below `parent`."""

    source = DISK

    def __init__(self, parent: Path, rows: float = 64, slots: int = ROWS, **options: Any) -> None:
        region, pool = Region.create(slots, ROW_BYTES), Pool(slots)
        limit = int(rows * FILE_BYTES)
        self.disk = Disk(parent, limit, "model", region, pool, **options)
        peers: Any = SimpleNamespace(
            reset=lambda: None, ready=False, post=lambda action: action(), pull=None
        )
        super().__init__(region, pool, compared_index("own"), peers.pull, self.disk)
        peers.namespace = self.namespace
        self.peers = peers.process = peers.canary = peers
        self.tier.open(peers)

    def compute(
        self, keys: Sequence[bytes], origin: str | None = None, probation: bool = False
    ) -> None:
        fill(self.region, self.pool, keys, origin=origin, probation=probation)

    async def save(self, keys: Sequence[bytes]) -> None:
        """Use chunks twice, and wait until they are saved."""
        self.compute(keys)
        self.disk.used(keys)
        self.disk.used(keys)
        await self.until(lambda: set(keys) <= {*self.disk.index})

    async def have_on_disk(self, keys: Sequence[bytes]) -> None:
        """Save chunks, and then forget all that the pool has."""
        await self.save(keys)
        await self.until(lambda: self.pool.counts().pinned == 0)
        self.pool.reset()

    async def until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self.disk._news.set()
            return condition()

        await super().until(look)


@asynccontextmanager
async def life(parent: Path, canary: Sketch | None = CANARY, **options: Any) -> AsyncIterator[Life]:
    """One whose engine computes a `canary` at the start."""
    replica = Life(parent, **options)
    running = asyncio.ensure_future(replica.disk.run(replica.publisher))
    if canary is not None:
        replica.disk.probed(b"canary", canary)
        await replica.until(lambda: replica.disk.state in (DiskState.OPEN, DiskState.DIFFERS))
    yield replica
    assert not running.done(), "nothing ends its loop"
    running.cancel()
    replica.disk.close()


def store_of(parent: Path) -> Path:
    return folder_of(parent, "namespace", ROW_BYTES)


def file_of(parent: Path, key: bytes) -> Path:
    return store_of(parent) / key.hex()[:2] / f"{key.hex()}.row"

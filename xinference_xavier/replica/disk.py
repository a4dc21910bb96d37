"""The host's disk beside the peers: what this replica saves there, and what it reads from there.

A chunk is saved, in the background, once two requests or a peer had it (or one, if all are saved),
or while a named prefix has it; only what this engine has computed itself, and nothing on probation.
It is read like a peer's: `Fetcher` runs the transaction, and the cost model knows the disk as one
more source.

| state     | what is done                   | left for                                          |
|-----------|--------------------------------|---------------------------------------------------|
| UNKNOWN   | nothing                        |                                                   |
| CLOSED    | the store is opened, if we may | COMPARING: it is open                             |
| COMPARING | waits for the engine's canary  | OPEN: whoever saved rows here computed the same   |
|           |                                | DIFFERS: it did not                               |
| OPEN      | rows are saved and read        | DIFFERS: an audit found a row that is not ours,   |
|           |                                | or a canary that came later differs               |
| DIFFERS   | waits for another store        | CLOSED: somebody has removed this one             |

An engine is UNKNOWN whose weights have no fingerprint: rows would outlive what a name stands for.
The other states are left for CLOSED when the namespace changes, and all but
DIFFERS when the disk fails.

Threading: the replica's background loop; the scheduler thread asks `PeerTier`. Calls to the disk
run in daemon threads, because they may never return: one for folders and for writing, others for
reading. If they hang, reads end by their deadlines, and the cost model leaves the disk out.
"""

import asyncio
import errno
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from xinference_xavier import disk_store
from xinference_xavier.disk_store import DamagedRowError, Store
from xinference_xavier.limits import MOST_PAUSE, TICK
from xinference_xavier.peers import DISK
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.sketches import Difference, Sketch, difference
from xinference_xavier.protocol.transfer import PullResult
from xinference_xavier.replica.reports import Publisher
from xinference_xavier.runtime.aio import DaemonThreads, to_its_end, within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.stats.schema import DiskStats

logger = logging.getLogger(__name__)

_HANGS = 10.0  # seconds
_BATCH = 16  # rows that are pinned and written at a time
READERS = 4
"""Threads that read."""
REMEMBERED = 4
"""Chunks that were used once, for each row of the pool."""
_MAX_WAITING = 1024  # rows to be read before more are refused
_SHARE = 10  # the file system is so many times as large as the store, by default


class DiskState(Enum):
    """See the module's docstring."""

    UNKNOWN = "weights unknown"
    CLOSED = "closed"
    COMPARING = "comparing"
    OPEN = "open"
    DIFFERS = "computed differently"


class Disk:
    """A store of at most `max_bytes` below `parent`, for the rows of `region`. None stands for a
    tenth of the file system. `by_name` are models whose weights have no fingerprint. Raises
    ConfigError if others could put rows into `parent`."""

    def __init__(
        self,
        parent: Path,
        max_bytes: int | None,
        model_uid: str,
        region: Region,
        pool: Pool,
        *,
        saves_all: bool = False,
        by_name: Sequence[str] = (),
    ) -> None:
        with suppress(OSError):  # it is not there yet, or fails, which passes
            disk_store.check_private(parent, parent.stat())
        self.index: Store | tuple[bytes, ...] = ()  # what can be read
        self.state = DiskState.CLOSED
        self.stats = DiskStats(folder=str(parent))
        if by_name:
            self.state = DiskState.UNKNOWN
            self.stats.problem = (
                f"there are no files with the weights of {', '.join(by_name)}, so nothing would "
                "tell rows of other weights with that name; launch the model from a folder"
            )
        self._parent = parent
        self._max_bytes = max_bytes
        self._model_uid = model_uid
        self._region = region
        self._pool = pool
        self._saves_all = saves_all
        self._namespace: str | None = None
        self._store: Store | None = None
        self._sketches: dict[str, Sketch] = {}  # by canary
        self._compared: dict[str, Sketch] = {}  # those of them that the store agrees with
        self._once: OrderedDict[bytes, None] = OrderedDict()  # chunks that one request had
        self._wanted: dict[bytes, int] = {}
        """Chunks to be saved, and when they were used, in nanoseconds."""
        self._touched: dict[bytes, int] = {}
        """Chunks of the store, and when they were used since it was told."""
        self._open_at = self._save_at = 0.0
        self._news = asyncio.Event()
        self._thread = DaemonThreads(1, "xavier-disk")
        self._readers = DaemonThreads(READERS, "xavier-disk-read")
        # While the disk hangs, the rows that wait cannot be used otherwise.
        self._max_waiting = min(_MAX_WAITING, pool.slots // 8)
        self._log = RateLimitedLog(logger)

    # -- told by the replica --------------------------------------------------------------------

    def move(self, namespace: str | None) -> None:
        """Change to the store of another namespace; None: to none."""
        if namespace == self._namespace or self.state is DiskState.UNKNOWN:
            return
        self._namespace = namespace
        self._once.clear()
        self._wanted.clear()
        self._close()
        self._open_at = 0.0

    def reset(self) -> None:
        """The engine's weights may have changed, and what it computes."""
        self.move(None)
        self._sketches.clear()

    def probed(self, key: bytes, sketch: Sketch) -> None:
        """The engine has computed a canary's chunk."""
        self._sketches[f"canary {key.hex()}"] = sketch
        self._news.set()

    def used(self, keys: Iterable[bytes]) -> None:
        """A request, or a peer, had these chunks."""
        again = []
        for key, used in _from_the_head(keys):
            if key in self.index:
                self._touched[key] = used
            elif self._saves_all or key in self._once:
                again.append(key)
            else:
                self._once[key] = None
        while len(self._once) > REMEMBERED * self._pool.slots:
            self._once.popitem(last=False)
        self.keep(again)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Save these chunks, such as those of a named prefix."""
        for key, used in _from_the_head(keys):
            if key not in self.index:
                self._wanted[key] = max(used, self._wanted.get(key, 0))
        for key in [*islice(self._wanted, max(0, len(self._wanted) - self._pool.slots))]:
            del self._wanted[key]  # there is no room for it in the pool
        if self._wanted:
            self._news.set()

    def distrust(self, found: Difference) -> None:
        """A row of the store differs from what the engine computes."""
        self._withdraw()
        self.state = DiskState.DIFFERS
        self._log.warn(
            "differs",
            "the disk has rows that were computed differently, and is not used; "
            "`xinference-xavier disk clear %s` removes them: layer=%s amount=%.3g",
            self._parent,
            found.layer,
            found.amount,
        )

    def close(self) -> None:
        """The replica ends."""
        self.move(None)
        self._thread.shutdown()
        self._readers.shutdown()

    def report(self) -> DiskStats:
        return replace(self.stats, state=self.state.value, rows=len(self.index))

    # -- reading --------------------------------------------------------------------------------

    async def read(self, rows: Sequence[Row], checksums: list[int]) -> PullResult:
        """Read the rows of these chunks, from the first one on, into their slots. `checksums` gets
        those of the rows that were verified. It may be cancelled only when it is done."""
        store, index = self._store, self.index
        held = [*takewhile(lambda row: row.key in index, rows)]
        if store is None or not held:
            return PullResult(0, "not held", DISK)
        if self._readers.waiting > self._max_waiting:
            return PullResult(0, "busy", DISK)
        loop = asyncio.get_running_loop()
        reading = asyncio.gather(
            *(
                loop.run_in_executor(
                    self._readers, store.read, row.key, self._region.row(row.slot).data
                )
                for row in held
            ),
            return_exceptions=True,
        )
        outcomes = await to_its_end(reading)  # until then, threads write to the rows
        if store is not self.index:  # it was closed, or its rows are not ours
            return PullResult(0, "not held", DISK)
        reason = None if len(held) == len(rows) else "not held"
        for outcome in reversed(outcomes):
            if isinstance(outcome, BaseException):
                reason = self._reason(outcome)
                checksums.clear()
            else:
                checksums.insert(0, outcome)
        return PullResult(len(checksums), reason, DISK)

    def _reason(self, error: BaseException) -> str:
        """Why a row was not read."""
        if isinstance(error, FileNotFoundError):  # another replica has removed it
            return "not held"
        if isinstance(error, DamagedRowError):
            return "checksum"
        self._failed(error)
        return "disk"

    # -- saving ---------------------------------------------------------------------------------

    async def run(self, publisher: Publisher) -> None:
        """Save what is wanted, and learn what others save, until cancelled. If the engine turns
        out to compute other rows, foreign ones are forgotten."""
        while True:
            before = self.state
            with suppress(TimeoutError):
                await within(0.0 if self._wanted and self._saves else TICK, self._news.wait())
            self._news.clear()
            try:
                await self._work()
            except Exception as error:  # whatever it is, sharing goes on
                self._failed(error)
                if self.state is not DiskState.DIFFERS:
                    self._close()
            if self.state is DiskState.DIFFERS is not before:
                publisher.forget_foreign()

    async def _begin(self) -> Store | None:
        """The namespace's store, opened anew; None if there is none, or until the next try."""
        now, namespace = time.monotonic(), self._namespace
        if namespace is None or now < self._open_at:
            return None
        self._open_at = now + MOST_PAUSE
        store: Store = await self._call(self._open, namespace)
        if namespace != self._namespace:  # it has changed meanwhile
            await self._call(store.close)
            return None
        self._store, self.stats.problem = store, ""
        if self.state is DiskState.CLOSED:
            self.state = DiskState.COMPARING
        return store

    async def _work(self) -> None:
        store = await self._begin() if self._store is None else self._store
        if store is None:
            return
        if await self._call(store.is_gone):
            if store is self._store:
                self._close()
            return
        if self.state is not DiskState.DIFFERS:
            await self._agree(store)
        if store is not self._store or self.state is DiskState.DIFFERS:
            return
        touched, self._touched = self._touched, {}
        rows = self._pinned() if self._saves else []
        try:
            failure = await self._call(self._update, store, touched, rows)
        finally:
            self._pool.unpin(rows)
        if failure is not None:
            if store is self._store:
                self._touched = {**touched, **self._touched}
            self._cannot_write(failure)
        elif rows:
            self.stats.problem = ""
        if not store.is_known:
            self._news.set()

    async def _agree(self, store: Store) -> None:
        """Compare what the engine has computed since the last time."""
        known = self._compared
        new = {name: each for name, each in self._sketches.items() if known.get(name) is not each}
        if not new or time.monotonic() < self._save_at:
            return
        try:
            found = await self._call(self._compare, store, new)
        except OSError as error:
            self._cannot_write(error)
            return
        if store is not self._store or self.state is DiskState.DIFFERS:
            return
        if found is not None:
            self.distrust(found)
            return
        self._compared.update(new)
        self.state, self.index = DiskState.OPEN, store

    def _cannot_write(self, error: Exception) -> None:
        """The disk may be full, and be read all the same."""
        self._failed(error)
        self._save_at = time.monotonic() + MOST_PAUSE

    @property
    def _saves(self) -> bool:
        """True if rows may be saved now. Before all are known, the limit could be exceeded."""
        return (
            self._store is not None
            and self._store.is_known
            and self.state is DiskState.OPEN
            and time.monotonic() >= self._save_at
        )

    def _pinned(self) -> list[Row]:
        """Some rows to save, pinned."""
        rows: list[Row] = []
        for key in [*islice(self._wanted, 64 * _BATCH)]:
            used = self._wanted.pop(key)
            row = None if key in self.index else self._pool.lookup(key)
            if row is None or row.origin is not None or row.checksum is None or row.probation:
                continue
            if self._pool.pin_row(row):
                rows.append(row)
                self._touched[key] = used  # once it is written
                if len(rows) == _BATCH:
                    break
        return rows

    async def _call(self, call: Callable[..., Any], *args: object) -> Any:
        """Call it in the thread for writing, and wait for as long as it takes."""
        calling = asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
        await asyncio.wait({calling}, timeout=_HANGS)
        if not calling.done():
            self._failed(TimeoutError(f"no answer within {_HANGS:g} s"))
        return await calling

    def _failed(self, error: BaseException) -> None:
        self.stats.failures += 1
        self.stats.problem = f"{type(error).__name__}: {error}"
        self._log.warn(
            str(error), "the disk fails, sharing goes on: folder=%s error=%r", self._parent, error
        )

    def _close(self) -> None:
        """Calls to the store that are under way go on."""
        if self._store is not None:
            self._thread.submit(self._store.close)
        self._withdraw()
        self._store, self.state = None, DiskState.CLOSED

    def _withdraw(self) -> None:
        """Nothing can be read."""
        self.index = ()
        self._touched.clear()
        self._compared.clear()

    # -- in the thread for writing ------------------------------------------------------------

    def _open(self, namespace: str) -> Store:
        self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        row_bytes = self._region.row_bytes
        limit = self._max_bytes or shutil.disk_usage(self._parent).total // _SHARE
        self.stats.limit_bytes = limit
        store = Store(self._parent, namespace, row_bytes, limit, self._model_uid)
        if not store.max_rows:
            reason = f"{limit} bytes hold no chunk of {row_bytes}"
            raise OSError(errno.ENOSPC, reason, str(self._parent))
        store.touch({})
        disk_store.remove_unused(self._parent, time.time())
        store.look()
        return store

    def _compare(self, store: Store, sketches: Mapping[str, Sketch]) -> Difference | None:
        """How the engine differs from those that have used the store."""
        for name, sketch in sketches.items():
            if (found := difference(sketch, store.note(name, sketch))) is not None:
                return found
        return None

    def _update(
        self, store: Store, touched: Mapping[bytes, int], rows: Sequence[Row]
    ) -> OSError | None:
        """Returns why not all could be written."""
        store.look()
        try:
            if touched:
                store.touch(touched)
            for row in rows:
                assert row.checksum is not None, "only such rows are saved"
                if store.write(row.key, self._region.row(row.slot).data, row.checksum):
                    self.stats.written_bytes += store.row_bytes
        except OSError as error:
            return error
        return None


def _from_the_head(keys: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """These chunks, used now, each a nanosecond before the one in front of it: what is behind a
    chunk is of no use without it, and is to go first."""
    now = time.time_ns()
    return ((key, now - place) for place, key in enumerate(keys))


class NoDisk(Disk):
    """The disk of a replica without a folder: it holds nothing, and never will."""

    def __init__(self) -> None:
        self.index = ()
        self.state = DiskState.CLOSED

    def move(self, namespace: str | None) -> None:
        pass

    def reset(self) -> None:
        pass

    def probed(self, key: bytes, sketch: Sketch) -> None:
        pass

    def used(self, keys: Iterable[bytes]) -> None:
        pass

    def keep(self, keys: Iterable[bytes]) -> None:
        pass

    def close(self) -> None:
        pass

    def report(self) -> DiskStats:
        return DiskStats()

    async def run(self, publisher: Publisher) -> None:
        pass

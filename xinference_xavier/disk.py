"""Rows on a local disk: what is left of a pool after a restart.

A store is a folder for one namespace; all replicas of a host that share in it open the same one.
`rows` is a file of equal rows, as a region is memory of them. `index.db`, an SQLite file, says
which chunk is in which slot, with its checksum and its last use.

Nobody owns a store. The transaction that hands out a slot removes its old entry, so no two
processes write to one. Whoever dies while it writes leaves slots without an entry, which are handed
out again after `_ABANDONED` seconds. Nothing is synced and no order of writes is relied on: each
row has a checksum, seeded by its chunk's key, which every reader verifies. So a row that is torn,
cut off, swapped or changed is no row. An index that is damaged is removed, and its rows with it.

Threading: any thread may read `index`, and call `read`, `has` and `write`, which block. All else is
for one thread at a time.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

_VERSION = 1
_INDEX, _ROWS, _LOCK = "index.db", "rows", "lock"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS slots (
    slot INTEGER PRIMARY KEY,
    key BLOB UNIQUE,
    checksum BLOB,
    used REAL NOT NULL,
    revision INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS slots_by_use ON slots (used);
CREATE INDEX IF NOT EXISTS slots_by_revision ON slots (revision);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""
_PATIENCE = 5.0
"""Seconds for another process to finish its transaction, or what it locks."""
_LOOK = 0.01  # seconds; nothing announces that a lock is free
_ABANDONED = 600.0
WEEK = 7 * 86400.0


class Place(NamedTuple):
    """Where a chunk's row is, and its checksum: 64-bit XXH3."""

    slot: int
    checksum: int


class StoreGoneError(OSError):
    """The store's folder was removed or replaced."""


def folder_of(parent: Path, namespace: str, row_bytes: int) -> Path:
    """The folder of a namespace's store below `parent`."""
    return parent / hashlib.sha256(f"{namespace} {row_bytes}".encode()).hexdigest()[:32]


class Store:
    """Holds `max_bytes` of rows at most. Raises OSError and sqlite3.Error, in all methods."""

    def __init__(
        self,
        folder: Path,
        row_bytes: int,
        max_bytes: int,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.row_bytes = folder, row_bytes
        self.slots = max_bytes // row_bytes
        self.index: dict[bytes, Place] = {}
        self._keys: dict[int, bytes] = {}  # by slot
        self._revision = 0
        self._clock = clock
        self._reading = threading.Lock()  # of `_reader`
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder):
            self._connection = self._whole_index()
            with closing_on_error(self._connection):
                self._inode = (folder / _INDEX).stat().st_ino
                self._reader = _read_only(folder / _INDEX)
                with closing_on_error(self._reader):
                    self._rows: _File | None = _File(_open_rows(folder / _ROWS))
        with closing_on_error(self):
            self.refresh()

    def _whole_index(self) -> sqlite3.Connection:
        """The index without what is beyond the limit, which may have been higher; a new one if it
        is damaged."""
        try:
            connection = _connect(self.folder)
            with closing_on_error(connection):
                connection.execute(  # not DELETE: others that have it open see what changed
                    "UPDATE slots SET key = NULL, checksum = NULL, used = 0,"
                    " revision = (SELECT max(revision) + 1 FROM slots)"
                    " WHERE slot >= ? AND key IS NOT NULL",
                    (self.slots,),
                )
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            discard(self.folder)
            return _connect(self.folder)
        with suppress(FileNotFoundError):
            rows = self.folder / _ROWS
            if rows.stat().st_size > self.slots * self.row_bytes:
                os.truncate(rows, self.slots * self.row_bytes)
        return connection

    def close(self) -> None:
        """`read` and `write` calls that are under way go on."""
        with self._reading:
            self._reader.close()
        self._connection.close()
        self._rows = None

    # -- rows ---------------------------------------------------------------------------------

    def read(self, slot: int, row: memoryview) -> bool:
        """Fill `row`; False if the file ends before its end. The caller verifies the checksum."""
        rows = self._opened()
        return os.preadv(rows.descriptor, [row], slot * self.row_bytes) == self.row_bytes

    def has(self, key: bytes, place: Place) -> bool:
        """Whether the chunk is still there. Waits for no change that is under way."""
        with self._reading:
            found = self._reader.execute(
                "SELECT 1 FROM slots WHERE slot = ? AND key = ? AND checksum = ?",
                (place.slot, key, place.checksum.to_bytes(8)),
            )
            return found.fetchone() is not None

    def write(self, slot: int, row: memoryview) -> None:
        """Raises OSError if the disk is full; then the store grows no further."""
        rows = self._opened()
        try:
            if os.pwritev(rows.descriptor, [row], slot * self.row_bytes) < self.row_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.slots = min(self.slots, slot)
            raise

    def _opened(self) -> "_File":
        """Keep what this returns until the end of the call."""
        if (rows := self._rows) is None:
            raise OSError(errno.EBADF, "the store is closed", str(self.folder))
        return rows

    # -- the index ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in what this and other processes have changed."""
        with self._whole():
            changed = self._connection.execute(
                "SELECT slot, key, checksum, revision FROM slots WHERE revision > ?"
                " ORDER BY revision",
                (self._revision,),
            )
            for slot, key, digest, revision in changed:
                self._revision = revision
                old = self._keys.pop(slot, None)
                if old is not None and self.index[old].slot == slot:
                    del self.index[old]
                if key is not None:
                    self._keys[slot] = key
                    self.index[key] = Place(slot, int.from_bytes(digest))

    def reserve(self, count: int) -> list[int]:
        """Slots that only the caller may write to: never used ones, then those without an entry,
        then those that were used least recently. Their entries are gone."""
        with self._transaction() as (execute, revision):
            (used,) = execute("SELECT coalesce(max(slot) + 1, 0) FROM slots").fetchone()
            fresh = range(used, min(used + count, self.slots))
            rows = execute(
                "SELECT slot FROM slots WHERE slot < :end AND key IS NULL AND used < :abandoned"
                " UNION ALL SELECT * FROM (SELECT slot FROM slots"
                " WHERE slot < :end AND key IS NOT NULL ORDER BY used LIMIT :count) LIMIT :count",
                {
                    "end": self.slots,
                    "abandoned": self._clock() - _ABANDONED,
                    "count": count - len(fresh),
                },
            )
            slots = [*fresh, *(slot for (slot,) in rows)]
            for slot in slots:
                execute(
                    "INSERT OR REPLACE INTO slots VALUES (?, NULL, NULL, ?, ?)",
                    (slot, self._clock(), revision),
                )
        return slots

    def commit(self, entries: Iterable[tuple[int, bytes, int]]) -> None:
        """Enter (slot, key, checksum) of what has been written. A chunk that somebody else has
        entered meanwhile is left out."""
        with self._transaction() as (execute, revision):
            for slot, key, digest in entries:
                execute(
                    "UPDATE OR IGNORE slots SET key = ?, checksum = ?, used = ?, revision = ?"
                    " WHERE slot = ? AND key IS NULL",
                    (key, digest.to_bytes(8), self._clock(), revision, slot),
                )
                execute("UPDATE slots SET used = 0 WHERE slot = ? AND key IS NULL", (slot,))

    def remove(self, places: Iterable[tuple[bytes, int]]) -> None:
        """Remove the entries of (key, slot): their rows are void."""
        with self._transaction() as (execute, revision):
            for key, slot in places:
                execute(
                    "UPDATE slots SET key = NULL, checksum = NULL, used = 0, revision = ?"
                    " WHERE slot = ? AND key = ?",
                    (revision, slot, key),
                )

    def touch(self, keys: Iterable[bytes]) -> None:
        """These chunks were used now."""
        with self._transaction() as (execute, _):
            for key in keys:
                execute("UPDATE slots SET used = ? WHERE key = ?", (self._clock(), key))
        os.utime(self.folder / _LOCK)

    def note(
        self, name: str, value: Any, merged: Callable[[Any, Any], Any] = lambda _, noted: noted
    ) -> Any:
        """The JSON-able note of this name: `value`, or `merged(value, noted)` if there was one."""
        with self._transaction() as (execute, _):
            row = execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
            text = json.dumps(value if row is None else merged(value, json.loads(row[0])))
            if row != (text,):
                execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, text))
        return json.loads(text)

    @contextmanager
    def _transaction(self) -> Iterator[tuple[Callable[..., sqlite3.Cursor], int]]:
        """To execute statements in, with the revision of what they change."""
        execute = self._connection.execute
        with self._whole():
            execute("BEGIN IMMEDIATE")
            try:
                (latest,) = execute("SELECT coalesce(max(revision), 0) FROM slots").fetchone()
                yield execute, latest + 1
                execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    execute("ROLLBACK")
                raise

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Remove the store if its index turns out to be damaged."""
        self._check_inode()
        try:
            yield
        except Exception as error:
            if is_damage(error):
                with locked(self.folder):
                    self._check_inode()  # somebody else may have begun it anew
                    discard(self.folder)
            raise

    def is_gone(self) -> bool:
        """Whether the folder was removed or replaced."""
        try:
            return (self.folder / _INDEX).stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _check_inode(self) -> None:
        if self.is_gone():
            raise StoreGoneError(errno.ENOENT, "the store was removed", str(self.folder))


class _File:
    """Closes `descriptor` when nobody uses it any more: another thread may be reading when its
    store is closed, and if the store was removed, its space is free only then."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


def is_damage(error: Exception) -> bool:
    """Whether an index has to be removed: it is no database, malformed, of another version, or has
    values that nobody writes. What the disk or another process does passes. Subclasses of
    DatabaseError stand for that, or for faults of ours."""
    return type(error) is sqlite3.DatabaseError or isinstance(error, (TypeError, ValueError))


@contextmanager
def closing_on_error(opened: sqlite3.Connection | Store) -> Iterator[None]:
    try:
        yield
    except BaseException:
        opened.close()
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While no other process opens or discards the store. Raises BlockingIOError, an OSError, if
    one takes longer than `_PATIENCE`: it may be suspended."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK)
        os.utime(lock)
        yield
    finally:
        os.close(lock)


def discard(folder: Path) -> None:
    """Remove index and rows. Processes that have them open notice."""
    for name in (_INDEX, f"{_INDEX}-wal", f"{_INDEX}-shm", _ROWS):
        (folder / name).unlink(missing_ok=True)


def _connect(folder: Path) -> sqlite3.Connection:
    file = folder / _INDEX
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(
        file, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
    )
    with closing_on_error(connection):
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"{file} has version {version}, not {_VERSION}")
        if version == 0:  # else nothing is written: the file system may be full
            connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;"
            )
    return connection


def _read_only(index: Path) -> sqlite3.Connection:
    """One for all questions: SQLite opens a file for each connection, and closes none of them while
    another connection of this process has the same file open."""
    connection = sqlite3.connect(
        f"{index.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False
    )
    with closing_on_error(connection):
        connection.execute("PRAGMA user_version").fetchone()  # opens the log too
    return connection


def _open_rows(file: Path) -> int:
    """Past the page cache, where the file system allows it: the rows are in a pool already."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with suppress(OSError):
        direct = os.open(file, flags | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.preadv(direct, [page], 0)
            return direct
        except OSError:
            os.close(direct)
            raise
    return os.open(file, flags, 0o600)


# -- all stores of a host --------------------------------------------------------------------------


class Summary(NamedTuple):
    """What a store has, and when it was last `used`, in seconds since the epoch. One with a
    `problem` is begun anew by the next replica that opens it."""

    folder: Path
    bytes: int
    used: float
    notes: Mapping[str, Any] = {}
    rows: int = 0
    problem: str = ""


def summaries(parent: Path) -> list[Summary]:
    """The stores below `parent`, the one used last first. Raises OSError."""
    found = []
    for folder in _folders(parent):
        with suppress(FileNotFoundError):  # removed meanwhile
            found.append(_summary(folder))
    return sorted(found, key=lambda each: each.used, reverse=True)


def _summary(folder: Path) -> Summary:
    size = 0
    with suppress(FileNotFoundError):  # a replica is just making it
        size = (folder / _ROWS).stat().st_blocks * 512
    found = Summary(folder, size, _last_use(folder))
    try:
        with closing(_connect(folder)) as connection:
            notes = dict(connection.execute("SELECT name, value FROM notes"))
            (rows,) = connection.execute("SELECT count(key) FROM slots").fetchone()
    except sqlite3.Error as error:
        return found._replace(problem=str(error))
    return found._replace(rows=rows, notes={name: json.loads(notes[name]) for name in notes})


class Checked(NamedTuple):
    right: int
    wrong: int


def check(folder: Path, row_bytes: int) -> Checked:
    """Read all rows of a store. Raises OSError, sqlite3.Error."""
    from xinference_xavier.pool.region import checksum  # imports numpy, which takes long

    with closing(_connect(folder)) as connection:
        entries = connection.execute(
            "SELECT slot, key, checksum FROM slots WHERE key IS NOT NULL"
        ).fetchall()
    rows = _open_rows(folder / _ROWS)
    right = 0
    try:
        with mmap.mmap(-1, row_bytes) as row:
            for slot, key, expected in entries:
                complete = os.preadv(rows, [row], slot * row_bytes) == row_bytes
                view = memoryview(row)
                right += complete and checksum(view, key) == int.from_bytes(expected)
                view.release()
    finally:
        os.close(rows)
    return Checked(right, len(entries) - right)


def remove(folder: Path) -> None:
    """Remove a store. Replicas that use it begin another one."""
    with locked(folder):
        discard(folder)
    shutil.rmtree(folder)


def remove_unused(parent: Path, now: float) -> list[Path]:
    """Remove the stores that nobody has used for a week; returns their folders."""
    unused = []
    for folder in _folders(parent):
        with suppress(FileNotFoundError):  # another replica starts, too, and was faster
            if now - _last_use(folder) > WEEK:
                remove(folder)
                unused.append(folder)
    return unused


def _folders(parent: Path) -> list[Path]:
    return [index.parent for index in parent.glob(f"*/{_INDEX}")]


def _last_use(folder: Path) -> float:
    return (folder / _LOCK).stat().st_mtime

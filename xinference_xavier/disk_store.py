"""Rows on a local disk: what is left of a pool after a restart.

A store is a folder for one namespace; all replicas of a host that share in it have the same one
open::

    0f1e….store/           0700, of the user that replicas run as
        store.json         model, namespace, bytes of a row
        canary ….json      what an engine computed, for others to compare themselves with
        ab/abcd….row       a chunk's row, named by its key: a page with the checksum, then the bytes

The files are the truth, and nobody owns them. A row is written under another name and renamed.
Nothing is synced and no order of writes is relied on: the checksum is seeded by the chunk's key,
and every reader verifies it. So a file that is torn, cut off, swapped or changed is no row, and who
reads it removes it; one that is gone is a miss.

A store knows its rows by the names in its folders: it lists all of them once it is open, and then
those that have changed, a portion at a time.

At the limit, a row takes the file of the one that was used least recently by the files' times,
chosen from a sample: the folders take turns, and as names are hashes, each has a fair share of all
rows. To overwrite a file is twice as fast as to make one.

Threading: any thread may ask whether a row is there, and `read`, which blocks. All else is for one
thread at a time.
"""

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple

from xinference_xavier.errors import ConfigError
from xinference_xavier.limits import LONGEST

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQQ")  # with the bytes of a row, and its checksum: 64-bit XXH3
_VERSION = b"xavier-1"
_PAGE = mmap.PAGESIZE
_FOLDERS = 256
_PORTION = 4096
"""Names that are listed at a time, which takes 10 ms."""
_SAMPLE, _PART = 1024, 16
"""So many rows are looked at, and one part of so many goes, the least recently used. A smaller
store is looked at as a whole."""
_TICK_NS = 20_000_000  # a file's time is rounded to less
WEEK = 7 * 86400.0
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_RESERVED_BYTES, _RESERVED_PART = 1 << 30, 50
"""Nothing is saved while less than this, or one part of so many, of the file system is free."""

_STORE = re.compile(r"[0-9a-f]{32}\.store")
_REMOVED = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{8}\.removed")
_FORMER = re.compile(r"[0-9a-f]{32}")  # of earlier versions
_FORMER_FILE = re.compile(r"index\.db(?:-wal|-shm)?|rows|lock")
_ROW_FILE = re.compile(r"(?:[0-9a-f]{2})+\.(?:row|[0-9a-f]{8}\.temporary)")
_NOTE = re.compile(r"(?:store|canary [0-9a-f]+)\.json|[0-9a-f]{8}\.temporary")


class DamagedRowError(Exception):
    """A file is not the row that its name says. It was removed."""


class DamagedNoteError(Exception):
    """Nothing tells who saved the rows of a store."""


def folder_of(parent: Path, namespace: str, row_bytes: int) -> Path:
    """The folder of a namespace's store below `parent`."""
    digest = hashlib.sha256(f"{namespace} {row_bytes}".encode()).hexdigest()[:32]
    return parent / f"{digest}.store"


def check_private(folder: Path, found: os.stat_result) -> None:
    """Raises ConfigError if others could put rows into the folder."""
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if found.st_uid != user:
        raise ConfigError(
            "xavier_disk",
            str(folder),
            f"belongs to user {found.st_uid}, but the replica runs as user {user}",
            "name a folder of that user, or one that is not there yet",
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            "xavier_disk",
            str(folder),
            f"may be written to by other users (mode {mode:o})",
            f"name a folder in it that is not there yet, or run chmod go-w {folder}",
        )


class Store:
    """Holds about `max_bytes` of rows at most: what other processes save is noticed later. All
    methods may raise OSError."""

    def __init__(
        self, parent: Path, namespace: str, row_bytes: int, max_bytes: int, model: str = ""
    ) -> None:
        """Open the store, or begin it. Raises ConfigError if the folder is not ours alone,
        BlockingIOError while somebody removes it, and DamagedNoteError."""
        self.folder = folder_of(parent, namespace, row_bytes)
        self.row_bytes = row_bytes
        self.max_rows = max_bytes // (_PAGE + row_bytes)
        self._keys: list[set[bytes]] = [set() for _ in range(_FOLDERS)]
        self._listed: list[int | None] = [None] * _FOLDERS
        """Each folder's mtime when it was last listed."""
        self._turn = cycle(range(_FOLDERS))
        self._oldest: list[tuple[int, bytes]] = []
        """Chunks to be replaced next, from the last one on, and when they were used."""
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        self._descriptor = _open_folder(self.folder)
        # Only once no read is using it.
        let_go = weakref.finalize(self, os.close, self._descriptor)
        try:
            check_private(self.folder, os.fstat(self._descriptor))
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # see `remove_unused`
            self.note("store", {"model": model, "namespace": namespace, "row_bytes": row_bytes})
            # While it is open, no other file gets its inode number.
            self._note_file = os.open("store.json", _READ, dir_fd=self._descriptor)
        except BaseException:
            let_go()  # the error's traceback may keep the store for long
            raise
        weakref.finalize(self, os.close, self._note_file)
        self._direct = _direct(self._descriptor)

    def close(self) -> None:
        """Let go of all rows. Calls of `read` that are under way go on."""
        for number in range(_FOLDERS):  # a million at once would hold up all threads
            self._keys[number] = set()

    def is_gone(self) -> bool:
        """True if the store was removed or replaced."""
        try:
            noted = (self.folder / "store.json").stat()
            return not os.path.samestat(noted, os.fstat(self._note_file))
        except FileNotFoundError:
            return True

    # -- which rows there are -----------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys[key[0]]

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __bool__(self) -> bool:
        return any(self._keys)  # the scheduler asks: its length takes longer

    def __iter__(self) -> Iterator[bytes]:
        for keys in self._keys:
            yield from [*keys]

    @property
    def is_known(self) -> bool:
        """True if all folders have been listed."""
        return None not in self._listed

    def look(self) -> None:
        """Take in a portion of what this and other processes have changed."""
        listed = 0
        for number in self._turns():
            if self._changed(number) != self._listed[number]:
                listed += self._list(number)
            if listed >= _PORTION:
                break

    def _turns(self) -> Iterator[int]:
        for _ in range(_FOLDERS):
            yield next(self._turn)

    def _changed(self, number: int) -> int:
        """When a row was last added to the folder, or removed."""
        try:
            return os.stat(f"{number:02x}", dir_fd=self._descriptor).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _list(self, number: int) -> int:
        """Learn a folder's rows; returns how many. Removes what a process that died has left."""
        changed, letters = self._changed(number), f"{number:02x}"
        rows, temporary = _row_files(self._descriptor, letters)
        self._keys[number] = {bytes.fromhex(name[:-4]) for name in rows}
        # What changes within one tick of the clock has the same time. A writer may die later.
        is_final = changed < time.time_ns() - _TICK_NS and not temporary
        self._listed[number] = changed if is_final else -1
        for name in temporary:
            self._remove_abandoned(f"{letters}/{name}")
        return len(rows)

    def _remove_abandoned(self, temporary: str) -> None:
        with suppress(FileNotFoundError):
            age = time.time() - os.stat(temporary, dir_fd=self._descriptor).st_mtime
            if abs(age) > LONGEST:  # the clock may have jumped
                os.unlink(temporary, dir_fd=self._descriptor)

    # -- rows ---------------------------------------------------------------------------------

    def read(self, key: bytes, row: memoryview) -> int:
        """Fill `row`, and return its checksum, which is verified. If it raises, the store no longer
        has the chunk: DamagedRowError; FileNotFoundError, if it was removed; other OSErrors."""
        try:
            return self._read(_name(key), key, row)
        except BaseException:
            self._keys[key[0]].discard(key)
            raise

    def _read(self, name: str, key: bytes, row: memoryview) -> int:
        from xinference_xavier.pool.region import checksum  # imports numpy, which takes long

        file = os.open(name, _READ | self._direct, dir_fd=self._descriptor)
        with _closing(file), mmap.mmap(-1, _PAGE) as page:
            is_whole = os.preadv(file, [page, row], 0) == _PAGE + self.row_bytes
            version, row_bytes, expected = _HEADER.unpack_from(page)
            is_ours = is_whole and (version, row_bytes) == (_VERSION, self.row_bytes)
            if is_ours and checksum(row, key) == expected:
                return int(expected)
            # Another row may have taken its place meanwhile.
            is_gone = not os.path.samestat(os.stat(name, dir_fd=self._descriptor), os.fstat(file))
        if is_gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        os.unlink(name, dir_fd=self._descriptor)
        raise DamagedRowError(f"{self.folder / name} is damaged")

    def write(self, key: bytes, row: memoryview, verified: int) -> bool:
        """Save a row, whose checksum this is; others make room for it. False if it is there
        already. Raises OSError if the file system has no room."""
        if key in self:
            return False
        self._check_space()
        name, folder = _name(key), f"{key[0]:02x}"
        temporary = f"{name.removesuffix('.row')}.{secrets.token_hex(4)}.temporary"
        if self._listed[key[0]] in (None, 0):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=self._descriptor)
        if len(self) >= self.max_rows:
            self._take_place(temporary)
        with mmap.mmap(-1, _PAGE) as page:
            _HEADER.pack_into(page, 0, _VERSION, self.row_bytes, verified)
            self._write(temporary, name, [page, row], self._direct)
        self._keys[key[0]].add(key)
        return True

    def touch(self, used: Mapping[bytes, int]) -> None:
        """Note when these chunks were used, in nanoseconds since the epoch; the store is used
        now."""
        times = {"store.json": time.time_ns(), **{_name(key): when for key, when in used.items()}}
        for name, when in times.items():
            with suppress(FileNotFoundError):
                os.utime(name, ns=(when, when), dir_fd=self._descriptor)

    def _take_place(self, temporary: str) -> None:
        """Give the file of the row that was used least recently this name. Above the limit, another
        one is removed, so that the store shrinks as rows are saved."""
        is_smaller, folder = False, self._descriptor
        for key in self._least_recently_used():
            name = _name(key)
            with suppress(FileNotFoundError):  # another process was faster: the next one
                if len(self) >= self.max_rows and not is_smaller:
                    os.unlink(name, dir_fd=folder)
                    is_smaller = True
                    continue
                os.utime(name, dir_fd=folder)  # or it would look abandoned
                os.rename(name, temporary, src_dir_fd=folder, dst_dir_fd=folder)
                return

    def _least_recently_used(self) -> Iterator[bytes]:
        """Chunks that this process no longer has."""
        while len(self):
            if not self._oldest:
                found = sorted(self._sample(), reverse=True)
                self._oldest = found[-max(1, len(found) // _PART) :]
            while self._oldest:
                used, key = self._oldest.pop()
                if self._used(key) == used:
                    self._keys[key[0]].discard(key)
                    yield key

    def _sample(self) -> list[tuple[int, bytes]]:
        """Chunks of some folders, and when they were last used."""
        found: list[tuple[int, bytes]] = []
        for number in self._turns():
            for key in [*self._keys[number]]:
                if (used := self._used(key)) is not None:
                    found.append((used, key))
            if len(found) >= _SAMPLE:
                break
        return found

    def _used(self, key: bytes) -> int | None:
        """When the chunk was last used; never, if that is to come: the clock was wrong. None if
        another process has removed it."""
        try:
            used = os.stat(_name(key), dir_fd=self._descriptor).st_mtime_ns
        except FileNotFoundError:
            self._keys[key[0]].discard(key)
            return None
        return used if used <= time.time_ns() else 0

    def _check_space(self) -> None:
        found = os.statvfs(self._descriptor)
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        reserved = max(_RESERVED_BYTES, total // _RESERVED_PART)
        if free < reserved + _PAGE + self.row_bytes:
            reason = f"{free} bytes are free, of which {reserved} are left to others"
            raise OSError(errno.ENOSPC, reason, str(self.folder))

    # -- files --------------------------------------------------------------------------------

    def note(self, name: str, value: Any) -> Any:
        """The JSON-able note of this name: `value`, unless there was one. Raises DamagedNoteError;
        then the store is removed."""
        try:
            try:
                return _noted(self._descriptor, name)
            except FileNotFoundError:
                with suppress(FileExistsError):  # another process was faster
                    self._note(name, value)
                return _noted(self._descriptor, name)
        except DamagedNoteError:
            remove(self.folder)
            raise

    def _note(self, name: str, value: Any) -> None:
        text = json.dumps(value).encode()
        data = hashlib.sha256(text).hexdigest().encode() + b" " + text
        temporary = f"{secrets.token_hex(4)}.temporary"
        self._write(temporary, f"{name}.json", [data], os.O_SYNC, os.link)

    def _write(
        self,
        temporary: str,
        name: str,
        parts: Sequence[Any],
        flags: int,
        place: Callable[..., None] = os.rename,
    ) -> None:
        """Write a file under another name first, which may be that of a row's. With `os.link`,
        raises FileExistsError if there is one of this name."""
        flags |= os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                file = os.open(temporary, flags, dir_fd=self._descriptor)
            except FileNotFoundError:
                flags |= os.O_CREAT | os.O_EXCL
                file = os.open(temporary, flags, 0o600, dir_fd=self._descriptor)
            with _closing(file):
                if os.writev(file, parts) < sum(map(len, parts)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
            place(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._descriptor)


def _name(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}.row"


def _open_folder(folder: Path | str, within: int | None = None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(folder, flags, dir_fd=within)


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _files(store: int, folder: str = ".") -> list[str]:
    """The names of all files in one of a store's folders."""
    try:
        descriptor = _open_folder(folder, store)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with _closing(descriptor), os.scandir(descriptor) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def _row_files(store: int, letters: str) -> tuple[list[str], list[str]]:
    """The names of the rows in one of a store's folders, and of those that are being written."""
    files = [
        name
        for name in _files(store, letters)
        if name.startswith(letters) and _ROW_FILE.fullmatch(name)
    ]
    return (
        [name for name in files if name.endswith(".row")],
        [name for name in files if name.endswith(".temporary")],
    )


def _noted(store: int, name: str) -> Any:
    """Raises FileNotFoundError, DamagedNoteError."""
    file = os.open(f"{name}.json", _READ, dir_fd=store)
    with open(file, "rb") as note:
        digest, _, text = note.read().partition(b" ")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamagedNoteError(f"{name}.json is damaged")
    return json.loads(text)


def _direct(store: int) -> int:
    """The flag to read and write past the page cache, if the file system allows it: rows are in a
    pool already."""
    try:
        file = os.open("store.json", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT, dir_fd=store)
        with _closing(file), mmap.mmap(-1, _PAGE) as page:
            os.preadv(file, [page], 0)
    except OSError:
        return 0
    return os.O_DIRECT


# -- all stores of a host --------------------------------------------------------------------------


class Summary(NamedTuple):
    """What a store has, and when it was last `used`, in seconds since the epoch. Without a
    namespace, replicas do not use it."""

    folder: Path
    used: float
    model: str = ""
    namespace: str = ""
    row_bytes: int = 0
    rows: int = 0

    @property
    def bytes(self) -> int:
        return self.rows * (_PAGE + self.row_bytes)


def summaries(parent: Path) -> list[Summary]:
    """The stores below `parent`, the one used last first. Raises OSError."""
    found = []
    for folder in _stores(parent):
        with suppress(FileNotFoundError):  # removed meanwhile
            found.append(_summary(folder))
    return sorted(found, key=lambda each: each.used, reverse=True)


def _summary(folder: Path) -> Summary:
    used = _last_use(folder)
    with _closing(store := _open_folder(folder)):
        try:
            notes = _noted(store, "store")
        except (FileNotFoundError, DamagedNoteError):
            return Summary(folder, used)
        rows = sum(len(_row_files(store, f"{number:02x}")[0]) for number in range(_FOLDERS))
        return Summary(folder, used, rows=rows, **notes)


def _last_use(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return (folder / "store.json").stat().st_mtime
    return folder.stat().st_mtime


def remove(folder: Path) -> None:
    """Remove what replicas have made there. Anything else stays, and the folder with it. Replicas
    that use the store begin another one."""
    removed = folder
    if _STORE.fullmatch(folder.name):
        removed = folder.with_name(f"{folder.name[:32]}.{secrets.token_hex(4)}.removed")
        folder.rename(removed)
    with _closing(store := _open_folder(removed)):
        is_ours = _FORMER_FILE if _FORMER.fullmatch(folder.name) else _NOTE
        for name in filter(is_ours.fullmatch, _files(store)):
            os.unlink(name, dir_fd=store)
        for number in range(_FOLDERS):
            _remove_rows(store, f"{number:02x}")
    with suppress(OSError):  # it is not empty
        removed.rmdir()


def _remove_rows(store: int, letters: str) -> None:
    for name in chain(*_row_files(store, letters)):
        with suppress(FileNotFoundError):
            os.unlink(f"{letters}/{name}", dir_fd=store)
    with suppress(OSError):  # it is not there, or not empty
        os.rmdir(letters, dir_fd=store)


def remove_unused(parent: Path, now: float) -> list[Path]:
    """Remove the stores that nobody has used for a week, nor has open; returns their folders. One
    that cannot be removed is logged."""
    unused = []
    for folder in _stores(parent):
        try:
            if now - _last_use(folder) > WEEK and not _FORMER.fullmatch(folder.name):
                with _closing(store := _open_folder(folder)):
                    fcntl.flock(store, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(folder)
                unused.append(folder)
        except (FileNotFoundError, BlockingIOError):  # it was removed, or is open
            continue
        except OSError as error:
            logger.warning("a store that nobody uses cannot be removed: %s: %r", folder, error)
    return unused


def _stores(parent: Path) -> list[Path]:
    """The stores that are used, and what is left of others."""
    with os.scandir(parent) as entries:
        folders = [parent / each.name for each in entries if each.is_dir(follow_symlinks=False)]
    return [
        each
        for each in folders
        if _STORE.fullmatch(each.name)
        or _REMOVED.fullmatch(each.name)
        or (_FORMER.fullmatch(each.name) and (each / "index.db").is_file())
    ]

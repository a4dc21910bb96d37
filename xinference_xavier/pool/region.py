"""The memory behind a pool: equal rows in one anonymous file that several processes map.

Life cycle: the first worker of an engine creates the region (`Region.create`) and hands its
descriptor to the engine's other processes (`serve_region`, `receive_region`). The file is a memfd:
it has no name in any file system, does not count towards /dev/shm, and disappears with its last
user, even a killed one.

Threading: a `Region` is immutable after creation. The pool decides who may write which row. Rows
are copied on threads of their own (`copy_threads`).
"""

import array
import ctypes
import fcntl
import glob
import itertools
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from xinference_xavier.errors import RegionError
from xinference_xavier.limits import LEAST_PAUSE
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!8sQQ")
_MAGIC = b"XAVIER01"
_CREDENTIALS = struct.Struct("iII")
_FILE = "xavier-region"
_POPULATE_STEP = 64 << 20
_POPULATE_THREADS = 8  # at most: all engines of a host may start at once
_MAX_NOTE = 1 << 20
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ROW_ALIGNMENT = mmap.PAGESIZE
COPY_THREADS = 2

_libc = ctypes.CDLL(None)  # its calls release Python's lock, unlike those of `mmap`
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


Memory = npt.NDArray[np.uint8]


def checksum(row: memoryview, key: bytes) -> int:
    """64-bit XXH3 of the row, seeded by its chunk key, so that another chunk's row differs."""
    return xxhash.xxh3_64_intdigest(row, seed=xxhash.xxh3_64_intdigest(key))


class Region:
    """`rows` rows of `row_bytes` bytes each; `array` has shape (rows, row_bytes), uint8."""

    note = b""
    """A text from the creator, set by `receive_region`."""

    def __init__(self, fd: int, rows: int, row_bytes: int) -> None:
        """Map `fd` and take ownership of it.

        Raises:
            RegionError: the file has another size, or could change its size.
        """
        try:
            size = os.fstat(fd).st_size
            if rows <= 0 or row_bytes <= 0 or rows * row_bytes != size:
                raise RegionError(
                    f"a region of {size} bytes cannot hold {rows} x {row_bytes} bytes"
                )
            _check_sealed(fd)
            self._map = mmap.mmap(fd, size)
        except OSError as error:
            os.close(fd)
            raise RegionError(f"the offered descriptor is not a region: {error}") from None
        except RegionError:
            os.close(fd)
            raise
        self.fd = fd
        self.rows = rows
        self.row_bytes = row_bytes
        self.array: Memory = np.frombuffer(self._map, dtype=np.uint8).reshape(rows, row_bytes)

    @classmethod
    def create(cls, rows: int, row_bytes: int) -> Self:
        """Make a region of zeros whose size nobody can change."""
        fd = os.memfd_create(_FILE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, rows * row_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
        return cls(fd, rows, row_bytes)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows * self.row_bytes

    @property
    def allocated(self) -> int:
        """Bytes that have pages, in whichever process."""
        return os.fstat(self.fd).st_blocks * 512

    def row(self, slot: int) -> Memory:
        """The bytes of one row, shape (row_bytes,)."""
        row: Memory = self.array[slot]
        return row

    def checksum(self, slot: int, key: bytes) -> int:
        return checksum(self.array[slot].data, key)

    def close(self) -> None:
        """Close the descriptor. The mapping ends with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def populate(rows: Memory, wanted: Callable[[], bool] = lambda: True) -> None:
    """Allocate each page of `rows`, shape (rows, bytes), and map it into this process, until no
    longer `wanted`, on as many threads as the calling one has processors.

    Otherwise the first use of a row is ten times slower if its pages do not exist, and twice as
    slow if this process has not mapped them (measured). Changes no byte, so others may write.
    """
    advice = _MADV_POPULATE_WRITE if rows.flags.writeable else _MADV_POPULATE_READ
    if rows.flags.c_contiguous:
        flat = rows.reshape(-1)
        parts = [flat[at : at + _POPULATE_STEP] for at in range(0, len(flat), _POPULATE_STEP)]
    else:  # a worker's cells
        parts = [*rows]
    to_do = iter(parts)

    def work() -> None:
        for part in to_do:
            if not wanted():
                return
            before = part.ctypes.data % mmap.PAGESIZE
            if _libc.madvise(part.ctypes.data - before, before + len(part), advice) != 0:
                part[:: mmap.PAGESIZE].max()  # an older kernel

    count = min(_POPULATE_THREADS, len(os.sched_getaffinity(0)), len(parts))
    helpers = [
        threading.Thread(target=work, name="xavier-populate", daemon=True) for _ in range(count - 1)
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def promised_bytes() -> int:
    """What the regions on this host have still to allocate. A region has its size at once, but its
    pages one by one. Only those of this user's processes are seen."""
    missing: dict[int, int] = {}
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(link).startswith(f"/memfd:{_FILE} "):
                file = os.stat(link)
                missing[file.st_ino] = max(0, file.st_size - file.st_blocks * 512)
    return sum(missing.values())


def _check_sealed(fd: int) -> None:
    # Otherwise any holder of the descriptor could shrink the file and kill its users with SIGBUS.
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise RegionError("the size of the offered region can be changed")


def socket_name(name: str) -> str:
    return f"\0xinference-xavier-{name}"


def check_same_user(peer: socket.socket) -> None:
    """Raises RegionError if the process at the other end runs as another user."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise RegionError(
            f"process {pid} runs as user {uid}, not as {os.getuid()}; run all replicas of a host "
            "as one user"
        )


class HostServer:
    """Answers processes of the same user, one after the other, on a thread of its own.

    The socket is an abstract Unix socket, so no file is left behind.
    """

    def __init__(self, name: str, answer: Callable[[socket.socket], None]) -> None:
        """`answer` may raise OSError and RegionError, which are logged."""
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(socket_name(name))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="xavier-host", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        log = RateLimitedLog(logger)
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                log.warn("accept", "no process of this host is answered yet: error=%r", error)
                self._closing.wait(LEAST_PAUSE)
                continue
            with peer:
                try:
                    peer.settimeout(1.0)
                    check_same_user(peer)
                    self._answer(peer)
                except (OSError, RegionError) as error:
                    log.warn("refused", "a process of this host is refused: error=%s", error)

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def serve_region(region: Region, incarnation: str, note: bytes = b"") -> HostServer:
    """Hand the region and a note to whoever asks for those of the incarnation."""
    assert len(note) <= _MAX_NOTE

    def hand_over(peer: socket.socket) -> None:
        header = _HEADER.pack(_MAGIC, region.rows, region.row_bytes)
        socket.send_fds(peer, [header], [region.fd])
        peer.sendall(note)

    return HostServer(incarnation, hand_over)


def receive_region(incarnation: str, timeout: float) -> Region:
    """Map the region that the engine's first worker serves, within `timeout` seconds.

    Raises:
        RegionError: nobody serves it in time, or a process of another user does.
    """
    deadline = time.monotonic() + timeout
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                peer.connect(socket_name(incarnation))
                check_same_user(peer)
                region = take_region(peer)
                with peer.makefile("rb") as rest:
                    region.note = rest.read(_MAX_NOTE)
                return region
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RegionError(
                        f"no worker offered the region of {incarnation} within {timeout:g} s "
                        f"({error})"
                    ) from None
        # The first worker is still starting, and nothing announces its socket.
        threading.Event().wait(0.02)


def take_region(peer: socket.socket) -> Region:
    """Map the region that the other end of a Unix socket hands over.

    Raises:
        RegionError: it sent something else.
    """
    descriptors = array.array("i")
    # Not by `recv_fds`, which lets a process that starts meanwhile inherit the memory.
    data, ancillary, _, _ = peer.recvmsg(
        _HEADER.size, socket.CMSG_LEN(descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if len(data) != _HEADER.size or len(descriptors) != 1:
        for fd in descriptors:
            os.close(fd)
        raise RegionError("the other end sent no region")
    magic, rows, row_bytes = _HEADER.unpack(data)
    if magic != _MAGIC:
        os.close(descriptors[0])
        raise RegionError(f"the offered region has another format: {magic!r}")
    return Region(descriptors[0], rows, row_bytes)


def copy_threads() -> ThreadPoolExecutor:
    """`COPY_THREADS` threads that divide this process's processors among them.

    Two threads that alternate on Python's lock wake each other, and Linux may keep both on one
    processor for as long as a copy takes. On two processors, 62 MiB in pages of 128 KiB took one
    thread 15 ms; two threads mostly 15, sometimes 9; two threads kept apart 9.
    """
    numbers = itertools.count()
    processors = sorted(_processors())

    def keep_apart() -> None:
        with suppress(OSError):  # too few processors: let the threads share them
            os.sched_setaffinity(0, processors[next(numbers) :: COPY_THREADS])

    return ThreadPoolExecutor(COPY_THREADS, "xavier-copy", initializer=keep_apart)


def _processors() -> set[int]:
    """The processors of all threads: vLLM binds each computing thread to one processor, and every
    other thread of its worker to the first one's."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            found |= os.sched_getaffinity(int(thread))
    return found

"""Several processes share a region of fixed size, and it disappears with its last user. Each thread
that copies rows has its own processors."""

import fcntl
import json
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier, get_ident

import numpy as np
import pytest

from tests.harness.remote import Remote, obey, spawned
from xinference_xavier.errors import RegionError
from xinference_xavier.pool import region as region_module
from xinference_xavier.pool.region import (
    COPY_THREADS,
    HostServer,
    Region,
    copy_threads,
    populate,
    promised_bytes,
    receive_region,
    serve_region,
    socket_name,
)

ROWS, ROW_BYTES = 8, 4096


@pytest.fixture
def incarnation() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create(ROWS, ROW_BYTES)
    yield region
    region.close()


@pytest.fixture
def server(region: Region, incarnation: str) -> Iterator[HostServer]:
    server = serve_region(region, incarnation)
    yield server
    server.close()


class _User:
    """Another process of the engine."""

    def __init__(self, incarnation: str) -> None:
        self._region = receive_region(incarnation, 30)

    def write(self, slot: int, value: int) -> tuple[int, int]:
        self._region.row(slot)[:] = value
        return self._region.rows, self._region.row_bytes


@pytest.mark.usefixtures("server")
def test_processes_share_the_same_bytes(region: Region, incarnation: str) -> None:
    with Remote(obey, _User, incarnation, context=spawned()) as user:
        assert user.call("write", 3, 77) == (ROWS, ROW_BYTES)
    assert (region.row(3) == 77).all()
    assert not region.row(2).any()
    assert not region.row(4).any()


@pytest.mark.parametrize("note", [b"", b'[{"backends": ["FLASH_ATTN"]}]', b"x" * 200_000])
def test_a_note_comes_with_the_region(region: Region, incarnation: str, note: bytes) -> None:
    with closing(serve_region(region, incarnation, note)):
        received = receive_region(incarnation, 30)
    assert received.note == note
    received.close()


def test_the_server_may_start_after_the_receiver(region: Region, incarnation: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive_region, incarnation, 30)
        with closing(serve_region(region, incarnation)), closing(receiving.result()) as received:
            region.row(0)[:] = 9
            assert (received.row(0) == 9).all()


def test_without_a_server_receiving_times_out(incarnation: str) -> None:
    with pytest.raises(RegionError, match=f"no worker offered the region of {incarnation}"):
        receive_region(incarnation, 0.05)


def test_a_server_that_does_not_answer_times_out(incarnation: str) -> None:
    with listener(incarnation), pytest.raises(RegionError, match="no worker offered"):
        receive_region(incarnation, 0.05)


def listener(incarnation: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(socket_name(incarnation))
    server.listen()
    return server


def whole() -> int:
    return os.dup(Region.create(ROWS, ROW_BYTES).fd)


def unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ROWS * ROW_BYTES)
    return fd


def plain_file() -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, ROWS * ROW_BYTES)
    return fd


def header(magic: bytes = b"XAVIER01", rows: int = ROWS) -> bytes:
    return struct.pack("!8sQQ", magic, rows, ROW_BYTES)


@pytest.mark.parametrize(
    ("header", "make", "error"),
    [
        (header(b"XAVIER99"), whole, "another format"),
        (header(rows=ROWS + 1), whole, "cannot hold 9 x 4096 bytes"),
        (header(rows=0), whole, "cannot hold 0 x 4096 bytes"),
        (b"XAVIER01", whole, "sent no region"),
        (header(), unsealed, "the size of the offered region can be changed"),
        (header(), plain_file, "the offered descriptor is not a region"),
        (header(), lambda: os.open("/", os.O_RDONLY), "cannot hold"),
        (header(), lambda: os.open("/dev/null", os.O_RDWR), "cannot hold"),
    ],
    ids=[
        *("another format", "too many rows", "no rows", "no sizes"),
        *("unsealed", "file", "folder", "device"),
    ],
)
def test_another_answer_is_refused_and_its_descriptor_closed(
    incarnation: str, header: bytes, make: Callable[[], int], error: str
) -> None:
    """A file that shrinks would kill its users."""
    fd = make()
    before = descriptors_of(fd)
    with listener(incarnation) as server:

        def answer() -> None:
            with server.accept()[0] as peer:
                socket.send_fds(peer, [header], [fd])

        with ThreadPoolExecutor(1) as threads:
            threads.submit(answer)
            with pytest.raises(RegionError, match=error):
                receive_region(incarnation, 30)
    assert descriptors_of(fd) == before
    os.close(fd)


class _FullServer(logging.Handler):
    """In a process without a free descriptor."""

    def __init__(self, incarnation: str) -> None:
        super().__init__()
        self._lines: SimpleQueue[str] = SimpleQueue()
        region_module.logger.addHandler(self)
        region_module.logger.propagate = False
        serve_region(Region.create(ROWS, ROW_BYTES), incarnation)
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, self._limits[1]))  # less than it has

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def complaint(self) -> str:
        return self._lines.get()

    def go_on(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def test_a_server_without_free_descriptors_serves_as_soon_as_it_has_some(incarnation: str) -> None:
    with Remote(obey, _FullServer, incarnation, context=spawned()) as server:
        server.wait_until_ready()
        # The kernel may have reserved a descriptor for the first one.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(socket_name(incarnation))
            assert "Too many open files" in server.call("complaint")
            with ThreadPoolExecutor(1) as threads:
                receiving = threads.submit(receive_region, incarnation, 30)
                server.call("go_on")
                with closing(receiving.result()) as received:
                    assert received.size == ROWS * ROW_BYTES


def descriptors_of(own: int) -> int:
    """How many descriptors of this process refer to the same file."""
    inode = os.fstat(own).st_ino
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.stat(f"/proc/self/fd/{fd}").st_ino == inode
    return count


@pytest.mark.usefixtures("server")
def test_another_user_gets_no_descriptor(
    incarnation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the server's side: the kernel reports another user than ours. The log tells it."""
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(socket_name(incarnation))
        assert peer.recvmsg(100, socket.CMSG_LEN(4))[:2] == (b"", [])
    assert "a process of this host is refused: error=process" in caplog.text


def test_a_server_of_another_user_is_refused(
    incarnation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with (
        listener(incarnation),
        pytest.raises(RegionError, match="12345; run all replicas of a host as one user"),
    ):
        receive_region(incarnation, 30)


def test_two_engines_cannot_have_one_incarnation(region: Region, incarnation: str) -> None:
    with closing(serve_region(region, incarnation)), pytest.raises(OSError, match="in use"):
        serve_region(region, incarnation)
    serve_region(region, incarnation).close()


def test_nobody_can_change_its_size(region: Region) -> None:
    """Shrinking it would kill its users with SIGBUS."""
    for size in (0, region.size - 1, region.size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, 0)


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 4096), (4096, 0)])
def test_a_region_needs_rows(rows: int, row_bytes: int) -> None:
    with pytest.raises(RegionError):
        Region.create(rows, row_bytes)


@pytest.mark.parametrize("advice", [region_module._MADV_POPULATE_WRITE, 9999])
def test_populating_keeps_the_bytes_on_older_kernels_too(
    region: Region, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(region_module, "_MADV_POPULATE_WRITE", advice)
    region.row(5)[:] = np.arange(ROW_BYTES) % 251
    populate(region.array)
    assert (region.row(5) == np.arange(ROW_BYTES) % 251).all()
    assert not region.row(4).any()
    assert region.allocated >= region.size


def resident(region: Region) -> int:
    """Bytes of the region that this process has mapped."""
    start = f"{region.array.ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(start))
    rss = next(line for line in lines if line.startswith("Rss:"))
    return int(rss.split()[1]) << 10


@pytest.mark.parametrize("writeable", [False, True])
def test_populating_maps_another_process_s_pages(region: Region, writeable: bool) -> None:
    region.array[:] = 7
    other = Region(os.dup(region.fd), ROWS, ROW_BYTES)
    other.array.flags.writeable = writeable
    assert resident(other) == 0
    populate(other.array)
    assert resident(other) == region.size
    assert (other.array == 7).all()
    other.close()


def test_a_region_promises_what_it_has_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_FILE", uuid.uuid4().hex)  # not those of other tests
    assert promised_bytes() == 0
    with closing(Region.create(ROWS, ROW_BYTES)) as region:
        with closing(Region(os.dup(region.fd), ROWS, ROW_BYTES)):
            assert promised_bytes() == region.size, "once, however many have it"
            region.row(5)[:] = 1
            assert promised_bytes() == region.size - ROW_BYTES
        populate(region.array)
        assert promised_bytes() == 0
        with closing(Region.create(ROWS, ROW_BYTES)):
            assert promised_bytes() == region.size
    assert promised_bytes() == 0


def test_populating_takes_the_processors_of_its_thread(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "_POPULATE_STEP", ROW_BYTES)
    together = Barrier(min(len(PROCESSORS), ROWS), timeout=60)
    met = set()

    def meet() -> bool:
        if get_ident() not in met:
            met.add(get_ident())
            together.wait()
        return True

    populate(region.array, meet)
    assert len(met) == together.parties
    assert region.allocated == region.size


def test_populating_stops_when_it_is_not_wanted(region: Region) -> None:
    populate(region.array, lambda: False)
    assert region.allocated == 0


def test_a_checksum_covers_bytes_and_key(region: Region) -> None:
    """So an intact row of another chunk does not pass."""
    region.row(0)[:] = 1
    region.row(1)[:] = 1
    checksum = region.checksum(0, b"key")
    assert region.checksum(1, b"key") == checksum
    assert region.checksum(0, b"kez") != checksum
    region.row(1)[-1] ^= 1
    assert region.checksum(1, b"key") != checksum


class _Owner:
    def __init__(self, incarnation: str) -> None:
        region = Region.create(ROWS, ROW_BYTES)
        populate(region.array)
        serve_region(region, incarnation)


def test_nothing_is_left_of_a_killed_owner(incarnation: str) -> None:
    """No file in /dev/shm and no socket. Processes that hold the descriptor keep working."""
    with Remote(obey, _Owner, incarnation, context=spawned()) as owner:
        region = receive_region(incarnation, 30)
        assert "/dev/shm" not in Path(f"/proc/{owner.pid}/maps").read_text()
        owner.kill()
    region.row(0)[:] = 1
    with pytest.raises(RegionError):
        receive_region(incarnation, 0.05)
    assert incarnation not in Path("/proc/net/unix").read_text()
    region.close()


# -- copy threads ----------------------------------------------------------------------------------

PROCESSORS = sorted(os.sched_getaffinity(0))


def processors_of_threads() -> list[list[int]]:
    barrier = Barrier(COPY_THREADS)

    def processors() -> list[int]:
        barrier.wait()
        return sorted(os.sched_getaffinity(0))

    with copy_threads() as pool:
        futures = [pool.submit(processors) for _ in range(COPY_THREADS)]
        return sorted(future.result() for future in futures)


def in_a_process_bound_to(first: list[int], second: list[int]) -> list[list[int]]:
    """`processors_of_threads` where one thread is bound to `first` and all others to `second`."""
    words = [sys.executable, "-m", __name__, json.dumps([first, second])]
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would have all processors
    answer: list[list[int]] = json.loads(subprocess.check_output(words, env=alone))
    return answer


def test_each_has_processors_of_its_own() -> None:
    first, second = processors_of_threads()
    assert first
    assert second
    assert sorted(first + second) == PROCESSORS


def test_a_single_processor_is_shared() -> None:
    only = PROCESSORS[:1]
    assert in_a_process_bound_to(only, only) == [only, only]


def test_they_use_the_processors_of_all_threads_of_the_process() -> None:
    """vLLM binds each OpenMP thread, and with them the thread that starts ours."""
    first, second = PROCESSORS[:1], PROCESSORS[1:2]
    assert in_a_process_bound_to(first, second) == [first, second]


if __name__ == "__main__":
    other, own = json.loads(sys.argv[1])
    # Its thread stays until the end.
    with ThreadPoolExecutor(1) as another:
        another.submit(os.sched_setaffinity, 0, other).result()
        os.sched_setaffinity(0, own)
        print(json.dumps(processors_of_threads()))

"""A window shows the rows of other pools behind the own ones, and nothing else."""

import json
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from xinference_xavier.errors import RegionError
from xinference_xavier.pool.region import Memory, Region, serve_region, socket_name
from xinference_xavier.pool.window import DONE, SPAN, Order, Window, WindowServer, worker_name

ROWS, ROW_BYTES = 4, 4096
ALL = slice(0, ROW_BYTES)


def region_of(value: int, rows: int = ROWS, row_bytes: int = ROW_BYTES) -> Region:
    region = Region.create(rows, row_bytes)
    region.array[:] = value
    return region


@pytest.fixture
def window() -> Window:
    return Window(region_of(1))


def test_the_own_rows_come_first_and_can_be_written(window: Window) -> None:
    window.array[2] = 9
    assert (window.own.row(2) == 9).all()
    assert (window.array[:2] == 1).all()


def test_a_neighbours_rows_are_what_it_writes_even_later(window: Window) -> None:
    theirs = region_of(5)
    rows = window.map(ROWS, theirs)
    assert (rows == 5).all()
    theirs.array[3] = 6
    theirs.close()
    assert (window.array[ROWS + 3] == 6).all()
    assert (window.array[:ROWS] == 1).all()


def test_several_neighbours_lie_side_by_side_and_one_can_take_anothers_place(
    window: Window,
) -> None:
    window.map(ROWS, region_of(5, rows=2))
    window.map(ROWS + 2, region_of(6))
    window.unmap(ROWS, 2)
    window.map(ROWS, region_of(7, rows=2))
    assert window.array[ROWS : 2 * ROWS, 0].tolist() == [7, 7, 6, 6]


@pytest.mark.parametrize(
    ("row", "rows", "first"),
    [(5, 511, 5), (5, 512, 512), (512, 600, 512), (513, 512, 1024)],
)
def test_what_fills_a_huge_page_begins_with_one(
    window: Window, row: int, rows: int, first: int
) -> None:
    """Rows have 4 KiB here, and huge pages 2 MiB."""
    assert window.room_from(row, rows) == first


@pytest.mark.parametrize(
    ("first", "region", "reason"),
    [
        (ROWS, (5, ROWS, 2 * ROW_BYTES), "its rows have 8192 bytes, the own ones 4096"),
        (ROWS - 1, (5,), "no room"),
        ((SPAN - 1) * ROWS + 1, (5,), "no room"),
    ],
    ids=["other rows", "over own rows", "behind the end"],
)
def test_what_does_not_fit_is_not_mapped(
    window: Window, first: int, region: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(RegionError, match=reason):
        window.map(first, region_of(*region))
    assert (window.array[:ROWS] == 1).all()


def test_a_neighbours_memory_goes_once_it_is_unmapped(window: Window) -> None:
    theirs = region_of(5)
    inode = Path(f"/proc/self/fd/{theirs.fd}").stat().st_ino
    window.map(ROWS, theirs)
    theirs.close()
    del theirs
    maps = Path("/proc/self/maps")
    assert f" {inode} " in maps.read_text()
    window.unmap(ROWS, ROWS)
    assert f" {inode} " not in maps.read_text()


MAKE = f"""
import resource, sys
from xinference_xavier.pool.region import Region
from xinference_xavier.pool.window import Window
own, theirs = Region.create({ROWS}, {ROW_BYTES}), Region.create({ROWS}, {ROW_BYTES})
"""


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAKE + code], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        f"window.map({ROWS}, theirs); window.array[{ROWS}] = 1",
        f"window.map({ROWS}, theirs); window.unmap({ROWS}, {ROWS}); window.array[{ROWS}].sum()",
        f"window.array[{ROWS}].sum()",
    ],
    ids=["a neighbour's row is written", "it is unmapped", "nothing was mapped"],
)
def test_a_wrong_access_ends_the_process_rather_than_give_wrong_bytes(code: str) -> None:
    assert child(f"window = Window(own); {code}").returncode == -signal.SIGSEGV


def test_without_addresses_for_neighbours_the_own_rows_are_there() -> None:
    """`ulimit -v` may be low."""
    limited = f"""
own = Region.create(64, 1 << 20)
used = int(open("/proc/self/statm").read().split()[0]) * {ROW_BYTES}
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
window = Window(own)
window.array[63] = 1
print(window.rows, own.row(63).sum())
"""
    answer = child(limited)
    assert answer.stdout == f"64 {1 << 20}\n", answer.stderr
    assert "no addresses for 2048 rows" in answer.stderr


# -- a worker's -----------------------------------------------------------------------------------


class Driver:
    """Pins at most `most` regions."""

    def __init__(self, most: int = 1) -> None:
        self.pinned: list[int] = []
        self._most = most

    def pin(self, rows: Memory) -> None:
        if len(self.pinned) == self._most:
            raise RegionError("the driver refuses")
        self.pinned.append(rows.ctypes.data)

    def unpin(self, rows: Memory) -> None:
        self.pinned.remove(rows.ctypes.data)


@pytest.fixture
def names() -> Iterator[tuple[str, str]]:
    """The own incarnation, and that of a neighbour whose rows are all 5."""
    own, peer = uuid.uuid4().hex, uuid.uuid4().hex
    with closing(serve_region(region_of(5), peer)):
        yield own, peer


def order(incarnation: str, what: Order) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
        worker.connect(socket_name(worker_name(incarnation, 3)))
        worker.sendall(json.dumps(what._asdict()).encode() + b"\n")
        with worker.makefile("rb") as answer:
            return answer.read()


def test_a_worker_maps_what_its_engine_says(window: Window, names: tuple[str, str]) -> None:
    own, peer = names
    with closing(WindowServer(window, own, 3, ALL, None)):
        assert order(own, Order(ROWS, ROWS, peer)) == DONE
        assert (window.array[ROWS : 2 * ROWS] == 5).all()
        assert order(own, Order(ROWS, ROWS)) == DONE


def test_a_worker_says_why_it_does_not(window: Window, names: tuple[str, str]) -> None:
    own, peer = names
    with closing(WindowServer(window, own, 3, ALL, None)):
        assert order(own, Order(0, ROWS, peer)) == b"there is no room for 4 rows"


def test_a_devices_driver_pins_what_is_mapped_until_it_is_unmapped(
    window: Window, names: tuple[str, str]
) -> None:
    own, peer = names
    driver = Driver()
    with closing(WindowServer(window, own, 3, ALL, driver)):
        assert order(own, Order(ROWS, ROWS, peer)) == DONE
        assert driver.pinned == [window.array[ROWS:].ctypes.data]
        assert order(own, Order(2 * ROWS, ROWS, peer)) == b"the driver refuses"
        assert order(own, Order(ROWS, ROWS)) == DONE
        assert not driver.pinned

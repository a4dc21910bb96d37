"""The pools of a host as one range of rows.

A window begins with the rows of the engine's own region. Behind them are those of its neighbours,
peers on the same host, read-only. So a neighbour's row is a slot number like any other, and vLLM
loads it as it loads an own row.

The engine has a window, and each of its workers. The engine decides what goes where, and tells the
workers (`WindowServer`). Addresses are reserved once, for `SPAN` times the own region: they cost
nothing until they are mapped.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import mmap
import os
import socket
from typing import NamedTuple, Protocol

import numpy as np

from xinference_xavier.errors import RegionError
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.pool.region import HostServer, Memory, Region, populate, receive_region

logger = logging.getLogger(__name__)

SPAN = 32
"""A host has at most sixteen cards, and pools differ in size."""
DONE = b"done"
_PROT_NONE = 0
_HUGE_PAGE, _MADV_HUGEPAGE = 2 << 20, 14
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release Python's lock, unlike those of `mmap`
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class Order(NamedTuple):
    """Map the region of `peer`, or nothing any more, to so many rows from `first` on."""

    first: int
    rows: int
    peer: str | None = None


def worker_name(incarnation: str, rank: int) -> str:
    """The name of the socket at which an engine's worker takes orders."""
    return f"{incarnation}-{rank}"


class Window:
    """`array` has shape (rows, row_bytes), uint8. A row that nothing is mapped to must not be
    touched: that ends the process, as wrong bytes would be worse.

    Threading: one thread maps and unmaps; any other uses what is mapped.
    """

    def __init__(self, own: Region) -> None:
        """`own` is at its beginning. Without addresses for neighbours there is room for none."""
        self.own, self.row_bytes = own, own.row_bytes
        for self.rows in (SPAN * own.rows, own.rows):
            try:
                self._address = self._map(None, self.rows, _PROT_NONE, -1)
                break
            except OSError as error:
                logger.warning("no addresses for %d rows: error=%s", self.rows, error)
        else:
            raise RegionError(
                f"no addresses for a pool of {own.size} bytes; raise the limit on "
                "virtual memory (ulimit -v)"
            )
        whole = (ctypes.c_uint8 * (self.rows * self.row_bytes)).from_address(self._address)
        self.array: Memory = np.ctypeslib.as_array(whole).reshape(self.rows, self.row_bytes)
        self._place(0, own, mmap.PROT_READ | mmap.PROT_WRITE)

    def map(self, first: int, region: Region, writable: bool = False) -> Memory:
        """Map a neighbour's region to the rows that begin with `first`; returns them.

        Raises:
            RegionError: its rows have another size, or there is no room for them.
        """
        if region.row_bytes != self.row_bytes:
            raise RegionError(
                f"its rows have {region.row_bytes} bytes, the own ones {self.row_bytes}"
            )
        if not self.own.rows <= first <= self.rows - region.rows:
            raise RegionError(f"there is no room for {region.rows} rows")
        try:
            self._place(first, region, mmap.PROT_READ | mmap.PROT_WRITE * writable)
        except OSError as error:
            raise RegionError(f"cannot map its memory: {error}") from None
        rows = self.array[first : first + region.rows]
        rows.flags.writeable = False
        return rows

    def room_from(self, row: int, rows: int) -> int:
        """The first row, from `row` on, where so many can be mapped in huge pages, if they fill
        any: then others map them in no time, and page tables take next to nothing."""
        size = _HUGE_PAGE // math.gcd(_HUGE_PAGE, self.row_bytes)
        return -(-row // size) * size if rows >= size else row

    def unmap(self, first: int, rows: int) -> None:
        """Reserve the addresses again; the memory goes with its last user."""
        self._map(self._at(first), rows, _PROT_NONE, -1)

    def _at(self, row: int) -> int:
        return self._address + row * self.row_bytes

    def _place(self, first: int, region: Region, access: int) -> None:
        address = self._map(self._at(first), region.rows, access, region.fd)
        _libc.madvise(address, region.size, _MADV_HUGEPAGE)  # where the host has them

    def _map(self, address: int | None, rows: int, access: int, fd: int) -> int:
        """Map a file, or no memory at all, from `address`, or anywhere. Raises OSError."""
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        flags = (kind if fd < 0 else mmap.MAP_SHARED) | _MAP_FIXED * (address is not None)
        found: int | None = _libc.mmap(address, rows * self.row_bytes, access, flags, fd, 0)
        if found is None or found == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found


class Pinning(Protocol):
    """What a device's driver must know of memory before it can read it."""

    def pin(self, rows: Memory) -> None:
        """Raises RegionError if the driver refuses."""

    def unpin(self, rows: Memory) -> None: ...


class WindowServer(HostServer):
    """Maps and unmaps neighbours in a worker's window, as its engine says.

    A connection has one order, a line of JSON, and its answer: `DONE`, or why it failed.
    """

    def __init__(
        self, window: Window, incarnation: str, rank: int, cell: slice, pinning: Pinning | None
    ) -> None:
        """`cell` are the worker's bytes in each row. With a `pinning`, neighbours' regions are
        mapped writable, as drivers want it, and never written."""
        self._window = window
        self._cell = cell
        self._pinning = pinning
        super().__init__(worker_name(incarnation, rank), self._obey)

    def _obey(self, engine: socket.socket) -> None:
        with engine.makefile("rb") as lines:
            order = Order(**json.loads(lines.readline()))
        answer = DONE
        try:
            if order.peer is None:
                self._unmap(order)
            else:
                self._map(order, order.peer)
        except RegionError as error:
            answer = str(error).encode()
        engine.sendall(answer)

    def _map(self, order: Order, peer: str) -> None:
        region = receive_region(peer, CALL_DEADLINE)
        rows = self._window.map(order.first, region, writable=self._pinning is not None)
        region.close()
        populate(rows[:, self._cell])
        if self._pinning is not None:
            try:
                self._pinning.pin(rows)
            except RegionError:
                self._window.unmap(order.first, order.rows)
                raise

    def _unmap(self, order: Order) -> None:
        rows = self._window.array[order.first : order.first + order.rows]
        if self._pinning is not None:
            self._pinning.unpin(rows)
        self._window.unmap(order.first, order.rows)

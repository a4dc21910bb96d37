"""Both ends of links, each in a process of its own, without engines.

A pair is a donor and a consumer with a region each; rows go from the donor's slots to the same
slots of the consumer. Besides our transports, an end implements the references: it sends the same
messages over a plain TCP connection, and copies the same rows with one thread's memcpy.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports.base import Acceptance, Link, Offer, Transport
from xinference_xavier.transfer.transports.gloo import GlooTransport
from xinference_xavier.transfer.transports.shared_memory import ConsumerLink, SharedMemoryTransport

HOST = "127.0.0.1"
TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (GlooTransport, SharedMemoryTransport)
}
TCP, MEMCPY = "tcp", "memcpy"
_SECRET = b"benchmark"
_PATIENCE = 120.0

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


class Span(NamedTuple):
    """Values of `time.monotonic()`, which all processes of a host share."""

    began: float
    ended: float


class _Inside:
    """Runs in the process of an end; each public method is a command."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4)
        self._region: Region
        self._links: dict[str, Link] = {}
        self._offers: dict[str, Offer] = {}
        self._completing: dict[str, Future[Any]] = {}
        self._socket: socket.socket

    def make_region(self, rows: int, row_bytes: int, seed: int) -> None:
        """Make a new region and close the links of the previous one."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._region = Region.create(rows, row_bytes)
        self._region.populate()
        self._region.array[:] = np.random.default_rng(seed).integers(0, 256, row_bytes, np.uint8)

    def offer(self, name: str) -> bytes:
        transport = TRANSPORTS[name](self._region, HOST, None)
        self._offers[name] = transport.offer(_SECRET, _later())
        return self._offers[name].hello

    def accept(self, name: str, hello: bytes) -> bytes:
        transport = TRANSPORTS[name](self._region, HOST, None)
        half: Acceptance = transport.accept(hello, _SECRET, _later())
        self._completing[name] = self._threads.submit(half.complete, _later())
        return half.answer

    def complete(self, name: str, answer: bytes) -> None:
        self._links[name] = self._offers.pop(name).complete(answer, _later())

    def completed(self, name: str) -> None:
        self._links[name] = self._completing.pop(name).result()

    def listen(self) -> int:
        listener = socket.create_server((HOST, 0))
        self._completing[TCP] = self._threads.submit(listener.accept)
        port: int = listener.getsockname()[1]
        return port

    def connect(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))

    def connected(self) -> None:
        self._socket, _ = self._completing.pop(TCP).result()

    def give(self, name: str, slots: Sequence[int]) -> Span:
        """Send rows as the donor."""
        began = time.monotonic()
        if name == TCP:
            for slot in slots:
                self._socket.sendall(self._region.row(slot).data)
        elif name != MEMCPY:
            self._links[name].send(slots, _later())
        return Span(began, time.monotonic())

    def take(self, name: str, slots: Sequence[int]) -> Span:
        """Receive rows as the consumer."""
        began = time.monotonic()
        if name == TCP:
            for slot in slots:
                _receive(self._socket, self._region.row(slot).data)
        elif name == MEMCPY:
            self._copy(slots)
        else:
            for _ in self._links[name].receive(slots, slots, _unchecked, _later()):
                pass
        return Span(began, time.monotonic())

    def _copy(self, slots: Sequence[int]) -> None:
        """Copy the same rows out of the donor's memory."""
        link = self._links[SharedMemoryTransport.name]
        assert isinstance(link, ConsumerLink)
        assert link._theirs is not None
        size = self._region.row_bytes
        own, theirs = self._region.array.ctypes.data, link._theirs.array.ctypes.data
        for slot in slots:
            _memcpy(own + slot * size, theirs + slot * size, size)

    def same(self, seed: int) -> bool:
        """Whether all rows are those of an end with this seed; wipes them afterwards."""
        row = np.random.default_rng(seed).integers(0, 256, self._region.row_bytes, np.uint8)
        same = bool((self._region.array == row).all())
        self._region.array[:] = 0
        return same


def _unchecked(slot: int) -> None:
    """No checksum: only moving the bytes is measured."""


def _receive(source: socket.socket, row: memoryview) -> None:
    while row:
        row = row[source.recv_into(row) :]


def _later() -> float:
    return time.monotonic() + _PATIENCE


def _run(pipe: Connection) -> None:
    inside = _Inside()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(inside, method)(*arguments))


class End:
    """The handle of an end's process; its commands are the methods of `_Inside`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def finish(self) -> Any:
        """The answer to `begin`."""
        return self._pipe.recv()

    def do(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.finish()

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


class Pair:
    """A donor and a consumer, linked by every transport and reference."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.donor, self.consumer = End(), End()

    def make(self, rows: int, row_bytes: int) -> None:
        self.donor.begin("make_region", rows, row_bytes, self._seed)
        self.consumer.do("make_region", rows, row_bytes, self._seed + 1)
        self.donor.finish()
        for name in TRANSPORTS:
            answer = self.donor.do("accept", name, self.consumer.do("offer", name))
            self.consumer.do("complete", name, answer)
            self.donor.do("completed", name)
        self.consumer.do("connect", self.donor.do("listen"))
        self.donor.do("connected")

    def begin(self, name: str, slots: Sequence[int]) -> None:
        self.consumer.begin("take", name, slots)
        self.donor.begin("give", name, slots)

    def finish(self) -> Span:
        """The time in which the consumer received the rows."""
        self.donor.finish()
        return Span(*self.consumer.finish())

    def is_right(self) -> bool:
        """Whether the right rows have just arrived."""
        return bool(self.consumer.do("same", self._seed))

    def close(self) -> None:
        self.donor.close()
        self.consumer.close()

"""Both ends of links, each in a process of its own, without engines.

A pair is a donor and a consumer with a region each; rows go from the donor's slots to the same
slots of the consumer. Besides our transports, an end implements the references: it sends the same
messages over a plain TCP connection, and copies the same rows with one thread's memcpy.
"""

import ctypes
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import numpy as np

from tests.harness.remote import Remote, obey, spawned
from xinference_xavier.pool.region import Region, populate, receive_region, serve_region
from xinference_xavier.transfer.transports.base import Acceptance, Link, Offer, Transport
from xinference_xavier.transfer.transports.gloo import GlooTransport
from xinference_xavier.transfer.transports.nixl import NixlTransport

HOST = "127.0.0.1"
TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (GlooTransport, NixlTransport)
}
TCP, MEMCPY = "tcp", "memcpy"
_PATIENCE = 120.0

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


class Span(NamedTuple):
    """Values of `time.monotonic()`, which all processes of a host share."""

    began: float
    ended: float


class _Inside:
    """An end, in its process; each public method is a command."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4)
        self._region: Region
        self._links: dict[str, Link] = {}
        self._offers: dict[str, Offer] = {}
        self._completing: dict[str, Future[Any]] = {}
        self._socket: socket.socket
        self._theirs: Region  # the consumer's view of the donor's
        self._served = ExitStack()

    def make_region(self, rows: int, row_bytes: int, seed: int) -> None:
        """Make a new region and close the links of the previous one."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._region = Region.create(rows, row_bytes)
        populate(self._region.array)
        self._region.array[:] = np.random.default_rng(seed).integers(0, 256, row_bytes, np.uint8)

    def serve(self) -> str:
        """Let the other end map the region of that name."""
        self._served.close()
        name = uuid.uuid4().hex
        self._served.callback(serve_region(self._region, name).close)
        return name

    def map(self, name: str) -> None:
        self._theirs = receive_region(name, _PATIENCE)
        populate(self._theirs.array)

    def offer(self, name: str) -> bytes:
        transport = TRANSPORTS[name](self._region, HOST, None)
        self._offers[name] = transport.offer(_later())
        return self._offers[name].hello

    def accept(self, name: str, hello: bytes) -> bytes:
        transport = TRANSPORTS[name](self._region, HOST, None)
        half: Acceptance = transport.accept(hello, _later())
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
        size = self._region.row_bytes
        own, theirs = self._region.array.ctypes.data, self._theirs.array.ctypes.data
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


class Pair:
    """A donor and a consumer, linked by every transport and reference."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.donor, self.consumer = (
            Remote(obey, _Inside, name=name, context=spawned(), patience=2 * _PATIENCE)
            for name in ("donor", "consumer")
        )
        self._moving: list[Future[Any]] = []

    def make(self, rows: int, row_bytes: int) -> None:
        making = self.donor.begin("make_region", rows, row_bytes, self._seed)
        self.consumer.call("make_region", rows, row_bytes, self._seed + 1)
        making.result()
        for name in TRANSPORTS:
            answer = self.donor.call("accept", name, self.consumer.call("offer", name))
            self.consumer.call("complete", name, answer)
            self.donor.call("completed", name)
        self.consumer.call("map", self.donor.call("serve"))
        self.consumer.call("connect", self.donor.call("listen"))
        self.donor.call("connected")

    def begin(self, name: str, slots: Sequence[int]) -> None:
        self._moving = [
            self.consumer.begin("take", name, slots),
            self.donor.begin("give", name, slots),
        ]

    def finish(self) -> Span:
        """The time in which the consumer received the rows."""
        taken, _ = (each.result() for each in self._moving)
        return Span(*taken)

    def is_right(self) -> bool:
        """Whether the right rows have just arrived."""
        return bool(self.consumer.call("same", self._seed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.donor.close()
        self.consumer.close()

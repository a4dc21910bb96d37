"""Rows between replicas of one host: the consumer copies them out of the donor's memory itself.

The donor's transfer process hands its region over, read-only, to a process of the same user that
proves the model's secret. From then on only slot numbers travel, over the same Unix socket: the
donor names the rows that it has granted, the consumer copies them and says when it is done.

The socket is abstract: it leaves no file, and it is found only in its own network namespace.
"""

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from xinference_xavier.errors import LinkError, RegionError
from xinference_xavier.pool.region import Region, check_same_user, offer_to_read, take_region
from xinference_xavier.transfer.base import Link, Transport

_NAME_BYTES = 16
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_COUNT = _SLOT = struct.Struct("!I")
_DONE = b"\1"
_CONSUMER, _DONOR = b"consumer", b"donor"


class SharedMemoryTransport(Transport):
    name = "shared_memory"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """`host` and `port_range` do not matter: nothing is sent over the network."""
        self._region = region

    def offer(self, secret: bytes, deadline: float) -> "_Offer":
        return _Offer(self._region, secret)

    def accept(self, hello: bytes, secret: bytes, deadline: float) -> "_Acceptance":
        if len(hello) != _NONCE_BYTES:
            raise LinkError(f"a hello of {len(hello)} bytes is none")
        return _Acceptance(self._region, secret, hello)


class _Offer:
    """The consumer's half: connects to the socket that the donor names."""

    def __init__(self, region: Region, secret: bytes) -> None:
        self._region = region
        self._secret = secret
        self.hello = os.urandom(_NONCE_BYTES)
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def complete(self, answer: bytes, deadline: float) -> "ConsumerLink":
        if len(answer) != _NAME_BYTES:
            raise LinkError(f"an answer of {len(answer)} bytes is none")
        try:
            _set_timeout(self._peer, deadline)
            self._peer.connect(_socket_name(answer))
            check_same_user(self._peer)
            _prove(self._peer, self._secret, self.hello + answer, _CONSUMER, _DONOR)
            theirs = take_region(self._peer)
        except (OSError, RegionError) as error:
            raise LinkError(f"the donor's memory cannot be had: {error}") from None
        if theirs.row_bytes != self._region.row_bytes:
            theirs.close()
            raise LinkError(f"the donor's rows have {theirs.row_bytes} bytes")
        return ConsumerLink(self._peer, self._region, theirs)

    def withdraw(self) -> None:
        self._peer.close()


class _Acceptance:
    """The donor's half: waits for the one consumer that knows the socket's name."""

    def __init__(self, region: Region, secret: bytes, hello: bytes) -> None:
        self._region = region
        self._secret = secret
        self._hello = hello
        self.answer = os.urandom(_NAME_BYTES)
        self._peer: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_socket_name(self.answer))
        self._listener.listen(1)

    def complete(self, deadline: float) -> "DonorLink":
        try:
            _set_timeout(self._listener, deadline)
            self._peer, _ = self._listener.accept()
            self._listener.close()
            _set_timeout(self._peer, deadline)
            check_same_user(self._peer)
            _prove(self._peer, self._secret, self._hello + self.answer, _DONOR, _CONSUMER)
            offer_to_read(self._peer, self._region)
        except (OSError, RegionError) as error:
            raise LinkError(f"the consumer did not come for our memory: {error}") from None
        return DonorLink(self._peer)

    def withdraw(self) -> None:
        self._listener.close()
        if self._peer is not None:
            self._peer.close()


class ConsumerLink(Link):
    """`theirs` is the donor's region, mapped read-only."""

    def __init__(self, peer: socket.socket, ours: Region, theirs: Region) -> None:
        self._peer = peer
        self._ours = ours
        self._theirs = theirs
        self._copying = threading.Lock()
        self._closed = False

    def receive(self, slots: Sequence[int], deadline: float) -> Iterator[int]:
        for slot, source in zip(slots, self._granted(len(slots), deadline), strict=True):
            with self._copying:
                if self._closed:
                    raise LinkError("the link was closed")
                np.copyto(self._ours.row(slot), self._theirs.row(source))
            yield slot
            if time.monotonic() > deadline:
                raise LinkError("timed out while copying")
        self._send(_DONE)

    def _granted(self, count: int, deadline: float) -> list[int]:
        """The donor's slots, of which there must be `count`."""
        try:
            _set_timeout(self._peer, deadline)
            (told,) = _COUNT.unpack(_receive_exactly(self._peer, _COUNT.size))
            if told != count:
                raise LinkError(f"{told} rows were granted, {count} are wanted")
            packed = _receive_exactly(self._peer, _SLOT.size * count)
        except OSError as error:
            raise LinkError(f"the donor did not name its rows: {error}") from None
        slots = [slot for (slot,) in _SLOT.iter_unpack(packed)]
        if max(slots, default=0) >= self._theirs.rows:
            raise LinkError(f"row {max(slots)} lies outside of the donor's memory")
        return slots

    def _send(self, message: bytes) -> None:
        try:
            self._peer.sendall(message)
        except OSError as error:
            raise LinkError(f"the donor is gone: {error}") from None

    def send(self, slots: Sequence[int], deadline: float) -> None:
        raise LinkError("a consumer's link does not send")

    def close(self) -> None:
        _shut(self._peer)
        with self._copying:  # whoever copies a row right now still does
            self._closed = True
            self._theirs.close()


class DonorLink(Link):
    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer

    def receive(self, slots: Sequence[int], deadline: float) -> Iterator[int]:
        raise LinkError("a donor's link does not receive")

    def send(self, slots: Sequence[int], deadline: float) -> None:
        try:
            _set_timeout(self._peer, deadline)
            self._peer.sendall(_COUNT.pack(len(slots)) + b"".join(map(_SLOT.pack, slots)))
            _receive_exactly(self._peer, len(_DONE))
        except OSError as error:
            raise LinkError(f"the consumer did not copy its rows: {error}") from None

    def close(self) -> None:
        _shut(self._peer)


def _socket_name(name: bytes) -> str:
    return f"\0xinference-xavier-link-{name.hex()}"


def _set_timeout(peer: socket.socket, deadline: float) -> None:
    peer.settimeout(max(0.001, deadline - time.monotonic()))


def _prove(
    peer: socket.socket, secret: bytes, transcript: bytes, own_role: bytes, other_role: bytes
) -> None:
    """Both sides show that they know the model's secret."""
    peer.sendall(hmac.digest(secret, own_role + transcript, "sha256"))
    theirs = _receive_exactly(peer, _PROOF_BYTES)
    if not hmac.compare_digest(theirs, hmac.digest(secret, other_role + transcript, "sha256")):
        raise LinkError("the peer does not know this model's secret")


def _receive_exactly(peer: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = peer.recv(count - len(received))
        if not part:
            raise OSError("the other side closed")
        received += part
    return bytes(received)


def _shut(peer: socket.socket) -> None:
    """End what blocks on it in another thread too."""
    with suppress(OSError):  # the other side was first
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()

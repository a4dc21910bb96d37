"""Rows between replicas of one host: the consumer copies them from the donor's memory.

The donor's transfer process shares its region, read-only, with a process of the same user. The
socket is abstract: it leaves no file.

Two threads copy row by row with numpy, which releases the GIL and is as fast as memcpy. Copying
adjacent rows together is up to a tenth faster (measured), but then the checksum finds its row no
longer in the CPU's caches and loses more. All links share these threads, and one thread that maps
donors' memory: a host has as many processors with a hundred donors as with one.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice, takewhile
from operator import length_hint
from typing import NamedTuple

import numpy as np

from xinference_xavier.errors import LinkError, LinkTimeoutError, RegionError
from xinference_xavier.pool.region import (
    COPY_THREADS,
    Region,
    check_same_user,
    copy_threads,
    offer_to_read,
    populate,
    take_region,
)
from xinference_xavier.protocol.transfer import check_slots
from xinference_xavier.runtime.aio import remaining
from xinference_xavier.runtime.host import host_identity
from xinference_xavier.transfer.transports.base import Check, Link, Transport

_NAME_BYTES = 16
_CLOSED = "the link was closed"
_TURN_BYTES = 4 << 20
"""Bytes that a thread copies for one link before it turns to the next: under a millisecond."""


class _Threads(NamedTuple):
    """The threads of all links. They end with the transport."""

    copying: ThreadPoolExecutor
    mapping: ThreadPoolExecutor


class SharedMemoryTransport(Transport):
    name = "shared_memory"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """Ignores `host` and `port_range`: it does not use the network."""
        self._region = region
        self._threads = _Threads(copy_threads(), ThreadPoolExecutor(1, "xavier-map"))
        self.host = host_identity()

    def offer(self, deadline: float) -> "_Offer":
        return _Offer(self._region, self._threads)

    def accept(self, hello: bytes, deadline: float) -> "_Acceptance":
        return _Acceptance(self._region)


class _Offer:
    """Connects to the socket that the donor names."""

    hello = b""

    def __init__(self, region: Region, threads: _Threads) -> None:
        self._region = region
        self._threads = threads
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link: ConsumerLink | None = None
        self._withdrawn = False

    def complete(self, answer: bytes, deadline: float) -> "ConsumerLink":
        try:
            self._peer.settimeout(remaining(deadline))
            self._peer.connect(_socket_name(answer))
            check_same_user(self._peer)
            self._peer.settimeout(remaining(deadline))
            theirs = take_region(self._peer)
        except TimeoutError:
            raise LinkTimeoutError("the donor did not offer its memory in time") from None
        except (OSError, RegionError) as error:
            raise LinkError(f"cannot map the donor's memory: {error}") from None
        self._peer.close()
        # Set before `_withdrawn` is read, as `withdraw` does it the other way round.
        self._link = ConsumerLink(self._region, theirs, self._threads)
        if self._withdrawn:
            self._link.close()
            raise LinkError("the link was withdrawn")
        return self._link

    def withdraw(self) -> None:
        self._withdrawn = True
        self._peer.close()
        if self._link is not None:
            self._link.close()


class _Acceptance:
    """Waits for the one consumer that knows the socket's name."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.answer = os.urandom(_NAME_BYTES)
        self._peer: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_socket_name(self.answer))
        self._listener.listen(1)

    def complete(self, deadline: float) -> "DonorLink":
        try:
            self._listener.settimeout(remaining(deadline))
            self._peer, _ = self._listener.accept()
            self._listener.close()
            check_same_user(self._peer)
            self._peer.settimeout(remaining(deadline))
            offer_to_read(self._peer, self._region)
        except TimeoutError:
            raise LinkTimeoutError("the consumer did not map our memory in time") from None
        except (OSError, RegionError) as error:
            raise LinkError(f"the consumer did not map our memory: {error}") from None
        self._peer.close()
        return DonorLink()

    def withdraw(self) -> None:
        self._listener.close()
        if self._peer is not None:
            self._peer.close()


class _Batch:
    """Rows that the copy threads copy, a few at a time in turn with the rows of other links.

    `copy(slot, source)` copies one of them. The first `error` ends the batch.
    """

    def __init__(
        self, rows: Sequence[tuple[int, int]], copy: Callable[[int, int], None], turn: int
    ) -> None:
        """Each `turn` is of so many rows."""
        self._rows = iter(rows)  # a thread that is free takes the next one
        self._copy = copy
        self._turn = turn
        self._changed = threading.Condition()
        self._copying = 0  # threads
        self._over = False
        self.copied: set[int] = set()  # slots
        self.error: Exception | None = None

    def run(self, threads: ThreadPoolExecutor) -> None:
        """Returns once the batch is over and nothing is being copied."""
        for _ in range(COPY_THREADS):
            threads.submit(self._take_turn, threads)
        with self._changed:
            self._changed.wait_for(lambda: self._over and not self._copying)

    def end(self) -> None:
        """Returns once the rows that are being copied are finished; no other row is begun."""
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: not self._copying)
            self._changed.notify_all()

    def _take_turn(self, threads: ThreadPoolExecutor) -> None:
        with self._changed:
            if self._over:
                return
            self._copying += 1
        more = False
        try:
            for slot, source in islice(self._rows, self._turn):
                self._copy(slot, source)
                self.copied.add(slot)
                if self._over:
                    break
            if length_hint(self._rows):
                threads.submit(self._take_turn, threads)
                more = True
        except Exception as error:
            self.error = self.error or error
        finally:
            with self._changed:
                self._copying -= 1
                self._over = self._over or not more
                if self._over and not self._copying:
                    self._changed.notify_all()


class ConsumerLink(Link):
    """Holds the only reference to `theirs`, the donor's region. A local variable would keep all
    memory of a donor that may be gone alive with the frames of an exception until the next garbage
    collection."""

    def __init__(self, ours: Region, theirs: Region, threads: _Threads) -> None:
        self._ours = ours
        self._theirs: Region | None = theirs
        self._closing = False
        self._their_rows = theirs.rows
        self._copy_threads = threads.copying
        self._batch: _Batch | None = None
        # In the background: rows that are fetched before it ends cost a few page faults.
        self._mapping = threads.mapping.submit(self._map)

    def _map(self) -> None:
        if self._theirs is not None:
            populate(self._theirs.array, lambda: not self._closing)

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        check_slots(granted, self._their_rows)

        def copy(slot: int, source: int) -> None:
            if time.monotonic() > deadline:
                raise LinkTimeoutError("not all rows were moved in time")
            assert self._theirs is not None, "it is unmapped after the last copy"
            np.copyto(self._ours.row(slot), self._theirs.row(source))
            check(slot)

        rows = [*zip(slots, granted, strict=True)]
        turn = max(1, _TURN_BYTES // self._ours.row_bytes)
        # Set before `_closing` is read, as `close` does it the other way round.
        batch = self._batch = _Batch(rows, copy, turn)
        if not self._closing:
            batch.run(self._copy_threads)
        self._batch = None
        yield from takewhile(batch.copied.__contains__, slots)
        if batch.error is not None:
            raise batch.error
        if len(batch.copied) < len(slots):
            raise LinkError(_CLOSED)

    def close(self) -> None:
        self._closing = True
        batch = self._batch
        if batch is not None:
            batch.end()
        theirs, self._theirs = self._theirs, None
        if theirs is not None:
            theirs.close()
        if not self._mapping.cancel():
            wait([self._mapping])


class DonorLink(Link):
    """Has nothing to do: the consumer copies the rows itself."""

    def send(self, slots: Sequence[int], deadline: float) -> None:
        """Do nothing: the consumer copies the rows."""

    def close(self) -> None:
        """The consumer unmaps the region itself."""


def _socket_name(name: bytes) -> str:
    return f"\0xinference-xavier-link-{name.hex()}"

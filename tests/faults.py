"""Transports that inject faults: each wraps a real one and gets one thing wrong.

A replica gets one as `transport="tests.faults:StallingGloo"`; it acts in that replica's transfer
process.
"""

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import psutil

from xinference_xavier.errors import LinkError, LinkTimeoutError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports.base import Acceptance, Check, Link, Offer, Transport
from xinference_xavier.transfer.transports.gloo import GlooLink, GlooTransport
from xinference_xavier.transfer.transports.nixl import NixlTransport

CORRUPT_ROW = 2
"""The row of every batch that a corrupting link damages."""
ROWS_BEFORE_STALL = 3
"""Rows that StallingGloo sends before it hangs."""
_STALL = b" and stall"
"""A stalling donor appends this to its answer."""


class _FaultyLink(Link):
    """Delegates to the link inside; subclasses do one thing differently."""

    def __init__(self, link: Link, region: Region) -> None:
        self.link = link
        self.region = region

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        return self.link.receive(slots, granted, check, deadline)

    def send(self, slots: Sequence[int], deadline: float) -> None:
        self.link.send(slots, deadline)

    def close(self) -> None:
        self.link.close()


class _HalfLink:
    """An offer or an acceptance that completes to a faulty link."""

    def __init__(self, half: Any, fault: Callable[[Link], Link]) -> None:
        self._half = half
        self._fault = fault

    @property
    def hello(self) -> bytes:
        part: bytes = self._half.hello
        return part

    @property
    def answer(self) -> bytes:
        part: bytes = self._half.answer
        return part

    def complete(self, *arguments: Any) -> Link:
        return self._fault(self._half.complete(*arguments))

    def withdraw(self) -> None:
        self._half.withdraw()


class _Faulty(Transport):
    link = _FaultyLink
    inner: type[Transport]

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        self.region = region
        self._inside = self.inner(region, host, port_range)

    def offer(self, deadline: float) -> Offer:
        return _HalfLink(self._inside.offer(deadline), self._wrap)

    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        return _HalfLink(self._inside.accept(hello, deadline), self._wrap)

    def _wrap(self, link: Link) -> Link:
        return self.link(link, self.region)


class _FaultyGloo(_Faulty):
    name = GlooTransport.name
    inner = GlooTransport


class _FaultyNixl(_Faulty):
    name = NixlTransport.name
    inner = NixlTransport


class _CorruptingLink(_FaultyLink):
    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        def corrupt(slot: int) -> None:
            if slot in slots[CORRUPT_ROW : CORRUPT_ROW + 1]:
                self.region.row(slot)[-1] ^= 1
            check(slot)

        return self.link.receive(slots, granted, corrupt, deadline)


class _Anything:
    """Equal to every checksum."""

    def __ne__(self, other: object) -> bool:
        return False


class _StallingLink(_FaultyLink):
    def __init__(self, link: Link, region: Region) -> None:
        super().__init__(link, region)
        self._closed = threading.Event()

    def send(self, slots: Sequence[int], deadline: float) -> None:
        self.link.send(slots[:ROWS_BEFORE_STALL], deadline)
        if len(slots) > ROWS_BEFORE_STALL:
            self._closed.wait()
            raise LinkError("stalled until it was closed")

    def close(self) -> None:
        self._closed.set()
        self.link.close()


class StallingGloo(_FaultyGloo):
    """A donor that sends a few rows and then nothing, until its consumer gives up."""

    link = _StallingLink


class StallingNixl(_FaultyNixl):
    """A donor that asks its consumer to take a few rows and then none, as it cannot enforce it."""

    link = _StallingLink

    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        return _StallingAcceptance(self._inside.accept(hello, deadline), self._wrap)


class _StallingAcceptance(_HalfLink):
    @property
    def answer(self) -> bytes:
        return super().answer + _STALL


class _StalledLink(_StallingLink):
    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        some = slots[:ROWS_BEFORE_STALL], granted[:ROWS_BEFORE_STALL]
        yield from self.link.receive(*some, check, deadline)
        if len(slots) > ROWS_BEFORE_STALL:
            closed = self._closed.wait(max(0.0, deadline - time.monotonic()))
            raise LinkError("closed") if closed else LinkTimeoutError("not all rows were sent")


class StallableNixl(_FaultyNixl):
    """A consumer that does what a stalling donor asks it to."""

    link = _StalledLink

    def offer(self, deadline: float) -> Offer:
        return _StallableOffer(self._inside.offer(deadline), self._wrap)


class _StallableOffer(_HalfLink):
    def complete(self, answer: bytes, deadline: float) -> Link:
        link: Link = self._half.complete(answer.removesuffix(_STALL), deadline)
        return self._fault(link) if answer.endswith(_STALL) else link


SCRIPT = "XAVIER_TEST_FAULT"
"""The environment variable with the path of the file that names the current fault."""


class Fault(StrEnum):
    NONE = "none"
    CORRUPT = "corrupt"
    STALL = "stall"


class _ScriptedLink(_FaultyLink):
    def __init__(self, link: Link, region: Region) -> None:
        super().__init__(link, region)
        self._corrupting = _CorruptingLink(link, region)
        self._stalled = _StalledLink(link, region)

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        links = {Fault.CORRUPT: self._corrupting, Fault.STALL: self._stalled}
        fault = Fault(Path(os.environ[SCRIPT]).read_text())
        return links.get(fault, self.link).receive(slots, granted, check, deadline)

    def close(self) -> None:
        self._stalled.close()


class ScriptedGloo(_FaultyGloo):
    """A file names the consumer's fault, for replicas whose processes a test cannot reach."""

    link = _ScriptedLink


ORDERS = "XAVIER_TEST_ORDERS"
"""The environment variable with the folder of faults ordered for a replica."""
UNCHECKED = "XAVIER_TEST_UNCHECKED"
"""This environment variable, if set, switches off the checksums of the process."""
LATE = 0.6
"""Seconds after its deadline at which a link still writes; the engine waits for 2."""
SLOW = 0.4
"""Seconds by which a slow donor is late."""
_TAKEN = "taken"


class Order(StrEnum):
    """Faults of one batch each, but for CLOSED, which lasts until it is withdrawn. Those up to
    DIE_RECEIVING hit consumers, the others donors."""

    DAMAGE = "damaged row"
    SWAP = "swapped rows"
    LATE = "late bytes"
    OVERSIZE = "too many bytes"
    REFUSE = "link refused"
    DIE_RECEIVING = "consumer's transfer process killed"
    STALL = "donor stalls"
    TOO_FEW = "too few rows"
    SLOW = "donor is slow"
    CUT = "link cut"
    DIE_SENDING = "donor's transfer process killed"
    CLOSED = "data port closed"


def order(folder: Path, fault: Order) -> None:
    """Inject this fault into the next batch that it applies to."""
    (folder / fault).touch()


def withdraw(folder: Path, fault: Order) -> bool:
    """Cancel the order; return False if the fault has already happened."""
    try:
        (folder / fault).unlink()
    except FileNotFoundError:
        return False
    return True


def taken(folder: Path) -> Counter[str]:
    """The faults so far; each is logged just before it happens."""
    log = folder / _TAKEN
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()


def _is_ordered(fault: Order) -> bool:
    return (Path(os.environ[ORDERS]) / fault).exists()


def _take(fault: Order) -> bool:
    folder = Path(os.environ[ORDERS])
    if not withdraw(folder, fault):
        return False
    with (folder / _TAKEN).open("a") as log:
        log.write(f"{fault}\n")
    return True


class _OrderedLink(_StallingLink):
    """`sockets` returns the file descriptors of the process's data connections."""

    def __init__(self, link: Link, region: Region, sockets: Callable[[], list[int]]) -> None:
        super().__init__(link, region)
        self._sockets = sockets

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        if _is_ordered(Order.REFUSE):
            raise LinkError("dropped, so that the next fetch opens another link")
        if _take(Order.DIE_RECEIVING):
            os.kill(os.getpid(), signal.SIGKILL)
        if _take(Order.OVERSIZE):
            self._receive_less(slots[0], deadline)
        if _take(Order.DAMAGE):
            return self._damaged(slots, granted, check, deadline)
        if len(slots) > 1 and _take(Order.SWAP):
            return self._swapped(slots, granted, check, deadline)
        if _take(Order.LATE):
            return self._late(slots, granted, deadline)
        return self.link.receive(slots, granted, check, deadline)

    def _receive_less(self, slot: int, deadline: float) -> None:
        """Post a receive that is shorter than the donor's message: Gloo ends this process."""
        link = cast(GlooLink, self.link)
        half = link._rows[slot][: self.region.row_bytes // 2]
        link._wait(link._post("recv", half, next(link._tags)), deadline)

    def _damaged(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        damaged = random.choice(slots)

        def damage(slot: int) -> None:
            if slot == damaged:
                self.region.row(slot)[random.randrange(self.region.row_bytes)] ^= 1
            check(slot)

        return self.link.receive(slots, granted, damage, deadline)

    def _swapped(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        arrived = list(self.link.receive(slots, granted, _unchecked, deadline))
        one, other = arrived[:2]
        self.region.array[[one, other]] = self.region.array[[other, one]]
        for slot in arrived:
            check(slot)
            yield slot

    def _late(self, slots: Sequence[int], granted: Sequence[int], deadline: float) -> Iterator[int]:
        """Like a device that writes memory regardless of deadlines."""
        arrived = self.link.receive(slots, granted, _unchecked, deadline)
        rows = [(slot, self.region.row(slot).copy()) for slot in arrived]
        threading.Event().wait(max(0.0, deadline - time.monotonic()) + LATE)
        for slot, row in rows:
            self.region.row(slot)[:] = row
        raise LinkTimeoutError("written after the deadline")
        yield  # an iterator, like the others

    def send(self, slots: Sequence[int], deadline: float) -> None:
        _check_port()
        if _take(Order.DIE_SENDING):
            self._begin_to_send(slots, deadline)
            os.kill(os.getpid(), signal.SIGKILL)
        if _take(Order.STALL):
            self._begin_to_send(slots, deadline)
            self._closed.wait(max(0.0, deadline - time.monotonic()) + LATE)
            raise LinkError("stalled until it was closed")
        if _take(Order.TOO_FEW):
            return self.link.send(slots[:-1], deadline)
        if _take(Order.SLOW):
            self._closed.wait(SLOW)
        if _take(Order.CUT):
            rest = self._begin_to_send(slots, deadline)
            for descriptor in self._sockets():
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            return self.link.send(rest, deadline)
        return self.link.send(slots, deadline)

    def _begin_to_send(self, slots: Sequence[int], deadline: float) -> Sequence[int]:
        """Send half of the rows; returns the rest."""
        half = len(slots) // 2
        self.link.send(slots[:half], deadline)
        return slots[half:]


def _check_port() -> None:
    if _is_ordered(Order.CLOSED):
        raise LinkError("closed")


def _unchecked(slot: int) -> None:
    """Accept any row."""


class _OrderedNixlLink(_OrderedLink):
    """Its donor only waits for the consumer, so a fault meets reads that are under way, or none."""

    def _begin_to_send(self, slots: Sequence[int], deadline: float) -> Sequence[int]:
        return slots


class _Ordered(_Faulty):
    """Faults are ordered, one batch at a time, while the process runs."""

    ordered: type[_OrderedLink]

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        super().__init__(region, host, port_range)
        self._loop = asyncio.get_running_loop()
        if UNCHECKED in os.environ:
            region.checksum = lambda slot, key: _Anything()  # type: ignore[method-assign,assignment,return-value]

    def offer(self, deadline: float) -> Offer:
        if _take(Order.REFUSE):
            raise LinkError("refused")
        return super().offer(deadline)

    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        _check_port()
        return super().accept(hello, deadline)

    def _wrap(self, link: Link) -> Link:
        return self.ordered(link, self.region, self._sockets)

    def _sockets(self) -> list[int]:
        """All connections but those of the event loop."""
        others = set(self._loop._selector.get_map())  # type: ignore[attr-defined]  # asyncio's own
        connections = psutil.Process().net_connections("tcp")
        return [
            c.fd for c in connections if c.status == psutil.CONN_ESTABLISHED and c.fd not in others
        ]


class OrderedGloo(_Ordered, _FaultyGloo):
    ordered = _OrderedLink


class OrderedNixl(_Ordered, _FaultyNixl):
    ordered = _OrderedNixlLink


ORDERED = {"gloo": OrderedGloo, "nixl": OrderedNixl}
OF_GLOO = (Order.OVERSIZE, Order.TOO_FEW)
"""The faults that only Gloo's messages can have."""

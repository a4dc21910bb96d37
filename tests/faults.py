"""Transports made for faults: Gloo, and one thing goes wrong.

A replica is given one as `transport="tests.faults:CorruptingGloo"`; it acts in that replica's
transfer process.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.base import Acceptance, Link, Offer, Transport
from xinference_xavier.transfer.gloo import GlooTransport

CORRUPT_ROW = 2
"""The row of every batch that CorruptingGloo damages."""
ROWS_BEFORE_STALL = 3
"""Rows that StallingGloo sends before it hangs."""
LINGER = 0.1
"""Seconds by which LingeringGloo is late."""


class _FaultyLink(Link):
    """A link that does what the one inside does; subclasses do one thing otherwise."""

    def __init__(self, link: Link, region: Region) -> None:
        self.link = link
        self.region = region

    def receive(self, slots: Sequence[int], deadline: float) -> Iterator[int]:
        return self.link.receive(slots, deadline)

    def send(self, slots: Sequence[int], deadline: float) -> None:
        self.link.send(slots, deadline)

    def close(self) -> None:
        self.link.close()


class _HalfLink:
    """An offer or an acceptance that becomes a faulty link."""

    def __init__(self, half: Any, fault: Callable[[Link], Link]) -> None:
        self._half = half
        self._fault = fault

    @property
    def hello(self) -> bytes:
        part: bytes = self._half.hello
        return part

    answer = hello

    def complete(self, *arguments: Any) -> Link:
        return self._fault(self._half.complete(*arguments))

    def withdraw(self) -> None:
        self._half.withdraw()


class _FaultyGloo(Transport):
    name = "faulty gloo"
    link = _FaultyLink

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        self.region = region
        self._gloo = GlooTransport(region, host, port_range)

    def offer(self, secret: bytes, deadline: float) -> Offer:
        return _HalfLink(self._gloo.offer(secret, deadline), self._wrap)

    def accept(self, hello: bytes, secret: bytes, deadline: float) -> Acceptance:
        return _HalfLink(self._gloo.accept(hello, secret, deadline), self._wrap)

    def _wrap(self, link: Link) -> Link:
        return self.link(link, self.region)


class _CorruptingLink(_FaultyLink):
    def receive(self, slots: Sequence[int], deadline: float) -> Iterator[int]:
        for position, slot in enumerate(self.link.receive(slots, deadline)):
            if position == CORRUPT_ROW:
                self.region.row(slot)[-1] ^= 1
            yield slot


class CorruptingGloo(_FaultyGloo):
    """One bit of one received row is wrong."""

    link = _CorruptingLink


class UncheckedCorruptingGloo(CorruptingGloo):
    """The same where nobody looks: what the check is there to catch."""

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        super().__init__(region, host, port_range)
        region.checksum = lambda slot, key: _Anything()  # type: ignore[method-assign,assignment]


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


class _LingeringLink(_FaultyLink):
    def send(self, slots: Sequence[int], deadline: float) -> None:
        self.link.send(slots, deadline)
        threading.Event().wait(LINGER)


class LingeringGloo(_FaultyGloo):
    """A donor that is slow to notice that its rows have left."""

    link = _LingeringLink


SCRIPT = "XAVIER_TEST_FAULT"
"""The environment variable that names the file with the fault of the moment."""


class Fault(StrEnum):
    NONE = "none"
    CORRUPT = "corrupt"
    STALL = "stall"


class _ScriptedLink(_FaultyLink):
    def __init__(self, link: Link, region: Region) -> None:
        super().__init__(link, region)
        self._corrupting = _CorruptingLink(link, region)
        self._stalling = _StallingLink(link, region)

    def receive(self, slots: Sequence[int], deadline: float) -> Iterator[int]:
        link = self._corrupting if _fault() is Fault.CORRUPT else self.link
        return link.receive(slots, deadline)

    def send(self, slots: Sequence[int], deadline: float) -> None:
        link = self._stalling if _fault() is Fault.STALL else self.link
        link.send(slots, deadline)

    def close(self) -> None:
        self._stalling.close()


def _fault() -> Fault:
    return Fault(Path(os.environ[SCRIPT]).read_text())


class ScriptedGloo(_FaultyGloo):
    """What goes wrong is written in a file, for replicas that a test cannot get hold of."""

    link = _ScriptedLink

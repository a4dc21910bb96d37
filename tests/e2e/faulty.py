"""A transport whose faults a test scripts, inside real replicas under xinference.

Launched with `xavier_transport="tests.e2e.faulty:FaultyGloo"`; the file named by the environment
variable holds the mode of the moment.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.base import Link, Offer, Transport
from xinference_xavier.transfer.gloo import GlooTransport

MODE_FILE = "XAVIER_TEST_FAULT"
NONE, CORRUPT, SLOW = "none", "corrupt", "slow"
SLOW_ROW = 0.05  # seconds


def mode() -> str:
    return Path(os.environ[MODE_FILE]).read_text()


class _FaultyLink(Link):
    def __init__(self, link: Link, region: Region) -> None:
        self._link = link
        self._region = region

    def receive(self, slots: Sequence[int], deadline: float) -> Iterator[int]:
        for slot in self._link.receive(slots, deadline):
            if mode() == CORRUPT:
                self._region.row(slot)[12345] ^= 1
            if mode() == SLOW:
                threading.Event().wait(SLOW_ROW)
            yield slot

    def send(self, slots: Sequence[int], deadline: float) -> None:
        self._link.send(slots, deadline)

    def close(self) -> None:
        self._link.close()


class _FaultyOffer:
    def __init__(self, offer: Offer, region: Region) -> None:
        self.hello = offer.hello
        self._offer = offer
        self._region = region

    def complete(self, answer: bytes, deadline: float) -> Link:
        return _FaultyLink(self._offer.complete(answer, deadline), self._region)

    def withdraw(self) -> None:
        self._offer.withdraw()


class FaultyGloo(Transport):
    name = "faulty gloo"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        self._region = region
        self._gloo = GlooTransport(region, host, port_range)

    def offer(self, secret: bytes, deadline: float) -> Offer:
        return _FaultyOffer(self._gloo.offer(secret, deadline), self._region)

    def accept(self, hello: bytes, secret: bytes, deadline: float):  # type: ignore[no-untyped-def]
        return self._gloo.accept(hello, secret, deadline)


class UncheckedFaultyGloo(FaultyGloo):
    """The same with the check of checksums switched off: what the check is there to catch."""

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        super().__init__(region, host, port_range)
        region.checksum = _Anything()  # type: ignore[method-assign,assignment]


class _Anything:
    """Equal to every checksum."""

    def __call__(self, slot: int, key: bytes) -> "_Anything":
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

"""Both ends of a link between two regions, for the tests of transports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports.base import Check, Transport

HOST = "127.0.0.1"
ROWS, ROW_BYTES = 64, 64 << 10
SOON = 0.2  # seconds: a deadline that passes
PATIENCE = 60.0  # a deadline that does not pass


def later() -> float:
    return time.monotonic() + PATIENCE


def soon() -> float:
    return time.monotonic() + SOON


def unchecked(slot: int) -> None:
    """Accept any row."""


class Side(NamedTuple):
    region: Region
    transport: Any

    @classmethod
    def make(cls, transport: type[Transport], seed: int, row_bytes: int = ROW_BYTES) -> Side:
        region = Region.create(ROWS, row_bytes)
        region.array[:] = np.random.default_rng(seed).integers(0, 256, (ROWS, row_bytes), np.uint8)
        return cls(region, transport(region, HOST, None))


class Halves(NamedTuple):
    """A link that is not complete yet."""

    offer: Any
    acceptance: Any

    @classmethod
    def make(cls, consumer: Side, donor: Side) -> Halves:
        offer = consumer.transport.offer(later())
        return cls(offer, donor.transport.accept(offer.hello, later()))

    def complete(self, threads: ThreadPoolExecutor) -> tuple[Future[Any], Future[Any]]:
        """Both ends."""
        return (
            threads.submit(self.offer.complete, self.acceptance.answer, later()),
            threads.submit(self.acceptance.complete, later()),
        )

    def withdraw(self) -> None:
        self.offer.withdraw()
        self.acceptance.withdraw()


class Link(NamedTuple):
    consumer: Any
    donor: Any
    threads: ThreadPoolExecutor

    @classmethod
    def make(cls, consumer: Side, donor: Side, threads: ThreadPoolExecutor) -> Link:
        halves = Halves.make(consumer, donor)
        try:
            ours, theirs = halves.complete(threads)
            return cls(ours.result(), theirs.result(), threads)
        except Exception:
            halves.withdraw()
            raise

    def move(
        self, slots: Sequence[int], granted: Sequence[int], check: Check = unchecked
    ) -> Iterator[int]:
        """Send the rows in `granted` and receive them into `slots`."""
        sending = self.threads.submit(self.donor.send, granted, later())
        yield from self.receive(slots, granted, check)
        sending.result()

    def receive(
        self,
        slots: Sequence[int],
        granted: Sequence[int],
        check: Check = unchecked,
        deadline: float | None = None,
    ) -> Iterator[int]:
        """Receive rows without a word to the donor."""
        rows: Iterator[int] = self.consumer.receive(slots, granted, check, deadline or later())
        return rows

    def close(self) -> None:
        self.consumer.close()
        self.donor.close()

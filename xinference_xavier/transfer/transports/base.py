"""The interface of a transport, which moves rows between two replicas.

Memory: bytes go from the donor's region directly to the consumer's. Both sides know the size
(`Region.row_bytes`) and the order of the rows beforehand.

Life cycle: the consumer makes an `offer`, the donor `accept`s it, and both get a `Link` for rows of
that donor to that consumer. A link carries one batch at a time. It is closed after its first
failure; the next fetch makes a new one.

Threading: everything here blocks and runs on any thread, one call of a link at a time. `close` is
the exception: any thread may call it at any time, and it interrupts blocked calls.

Trust: the consumer has proved that it knows the model's secret before the donor accepts anything.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region

Check = Callable[[int], None]  # raises LinkError if the slot does not hold the expected row


class Link(ABC):
    """Carries rows of one donor to one consumer. Deadlines are `time.monotonic()` seconds. Each
    end has `receive` or `send`."""

    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        """Receive the rows in the donor's slots `granted` into our `slots`. Yields each slot, in
        order, once its row is complete and has passed `check`, which runs on any thread.

        Raises:
            LinkError: the peer failed, a slot is outside of its memory, the deadline passed, or
                `check` raised it.
        """
        raise LinkError("a donor cannot receive")

    def send(self, slots: Sequence[int], deadline: float) -> None:
        """Send the rows in `slots`, in order; returns once they have left our memory. Raises
        LinkError: the peer failed, or the deadline passed."""
        raise LinkError("a consumer cannot send")

    @abstractmethod
    def close(self) -> None:
        """End the link. After this, nothing writes to our region any more."""


class Offer(Protocol):
    """The consumer's half of a link that is being made."""

    @property
    def hello(self) -> bytes:
        """The argument of the donor's `accept`."""

    def complete(self, answer: bytes, deadline: float) -> Link:
        """Make the link with the donor's answer."""

    def withdraw(self) -> None:
        """Abandon the link, complete or not."""


class Acceptance(Protocol):
    """The donor's half of a link that is being made."""

    @property
    def answer(self) -> bytes:
        """The argument of the consumer's `complete`."""

    def complete(self, deadline: float) -> Link:
        """Make the link; blocks until the consumer has completed its half."""

    def withdraw(self) -> None:
        """Abandon the link, complete or not."""


class Transport(ABC):
    """Makes links for one region.

    Both ends of a link use transports of the same `name`, which appears in status and metrics.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """Listen on `host`, and if the transport can choose, on a port in `port_range` (inclusive).

        Raises:
            TransportError: `host` or the range cannot be used on this host.
        """

    @classmethod
    def unfit(cls) -> str | None:
        """The reason for using the next best transport on this host; None without one."""
        return None

    @abstractmethod
    def offer(self, deadline: float) -> Offer:
        """Start to make a link as its consumer."""

    @abstractmethod
    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        """Start to make a link as its donor."""

"""What it takes to move rows between two replicas; one implementation per kind of network.

Memory model: rows go from the donor's region row to the consumer's region row. Both sides know the
size (`Region.row_bytes`) and the order of the rows beforehand; nothing on the wire says so.

Life cycle: a consumer `offer`s a link, the donor `accept`s it, both get a `Link` for rows of that
donor to that consumer. A link carries one batch at a time. After the first failure it is closed and
a new one is made for the next fetch.

Threading: everything here blocks and is called from a thread of the link's own, except `close`,
which any thread may call at any time and which ends what blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from xinference_xavier.pool.region import Region

Check = Callable[[int], None]
"""Raises LinkError if the row in this slot is not the one that it is to be."""


class Link(ABC):
    """One donor's rows to one consumer. Deadlines are `time.monotonic()` seconds."""

    @abstractmethod
    def receive(
        self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
    ) -> Iterator[int]:
        """Take the donor's next rows, those in its slots `granted`, into `slots`, yielding each
        slot when its row is whole and has passed `check`, on whatever thread had it last.

        Raises:
            LinkError: the peer failed, or the deadline passed; or what `check` raises.
        """

    @abstractmethod
    def send(self, slots: Sequence[int], deadline: float) -> None:
        """Send the rows in `slots`, in order; return when they have left our memory.

        Raises:
            LinkError: the peer failed, or the deadline passed.
        """

    @abstractmethod
    def close(self) -> None:
        """End the link. When this returns, nothing late is written to our region any more."""


class Offer(Protocol):
    """A consumer's half-open link."""

    @property
    def hello(self) -> bytes:
        """To be handed to the donor's `accept`."""

    def complete(self, answer: bytes, deadline: float) -> Link:
        """Make the link with the donor's answer."""

    def withdraw(self) -> None:
        """Give the link up, complete or not."""


class Acceptance(Protocol):
    """A donor's half-open link."""

    @property
    def answer(self) -> bytes:
        """To be handed to the consumer's `complete`."""

    def complete(self, deadline: float) -> Link:
        """Make the link; blocks until the consumer completed its side."""

    def withdraw(self) -> None:
        """Give the link up, complete or not."""


class Transport(ABC):
    """Makes links for one region.

    `name` says what is spoken on them: both ends of a link have a transport of the same name. It
    appears in status and metrics. `host` is the `host_identity` of the only host whose processes
    can be linked; None where links reach any host.
    """

    name: ClassVar[str]
    host: str | None = None

    @abstractmethod
    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """Listen on `host`, within `port_range` (both ends included) if there is one.

        Raises:
            TransportError: `host` or the range cannot be used on this machine.
        """

    @abstractmethod
    def offer(self, secret: bytes, deadline: float) -> Offer:
        """Begin a link as its consumer."""

    @abstractmethod
    def accept(self, hello: bytes, secret: bytes, deadline: float) -> Acceptance:
        """Begin a link as its donor, with the consumer's hello."""

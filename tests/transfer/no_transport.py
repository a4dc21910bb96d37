"""For tests in which no row moves: a transport that makes no links, and is there in no time."""

import gc

from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports.base import Acceptance, Offer, Transport


class NoTransport(Transport):
    name = "none"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """Needs nothing."""

    def offer(self, secret: bytes, deadline: float) -> Offer:
        raise LinkError("makes no links")

    def accept(self, hello: bytes, secret: bytes, deadline: float) -> Acceptance:
        raise LinkError("makes no links")


class TellingTransport(NoTransport):
    """Its name tells whether the garbage collector leaves alone what is there from the start."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return "frozen" if gc.get_freeze_count() else "searched"

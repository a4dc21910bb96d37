"""A transport for tests in which no row moves: it makes no links and starts at once."""

import gc

from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports.base import Acceptance, Offer, Transport


class NoTransport(Transport):
    name = "none"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        """Accept the arguments of a transport."""

    def offer(self, deadline: float) -> Offer:
        raise LinkError("makes no links")

    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        raise LinkError("makes no links")


class TellingTransport(NoTransport):
    """Its name tells whether the garbage collector ignores the objects of the start."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return "frozen" if gc.get_freeze_count() else "searched"

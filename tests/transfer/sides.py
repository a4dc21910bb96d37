"""Transfer actors with real links between them, over each transport, healthy or faulty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import xoscar

from tests import faults
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import (
    PROTOCOL_VERSION,
    TRANSFER_UID,
    Endpoint,
    PullOrder,
    PullResult,
    Startup,
    prove,
)
from xinference_xavier.runtime.net import listen
from xinference_xavier.transfer.__main__ import TransferActor
from xinference_xavier.transfer.transports.base import Transport
from xinference_xavier.transfer.transports.gloo import GlooTransport
from xinference_xavier.transfer.transports.nixl import NixlTransport

HOST = "127.0.0.1"
ROWS, ROW_BYTES = 32, 16 << 10
SECRET = b"s" * 32
KEYS = tuple(bytes([n]) * 36 for n in range(ROWS))
PATIENCE = 30.0
NOBODY: frozenset[str] = frozenset()


class Kind(NamedTuple):
    """A transport, and its variants with one fault each."""

    plain: type[Transport]
    faulty: type[Transport]  # without a fault of its own
    stalling: type[Transport]
    stallable: type[Transport]  # for the consumer of a `stalling` donor

    def with_link(self, link: type[faults._FaultyLink]) -> type[Transport]:
        return type("Made", (self.faulty,), {"link": link})


KINDS = {
    "gloo": Kind(GlooTransport, faults._FaultyGloo, faults.StallingGloo, GlooTransport),
    "nixl": Kind(NixlTransport, faults._FaultyNixl, faults.StallingNixl, faults.StallableNixl),
}


class Side(NamedTuple):
    """One replica's transfer actor, and the data of its engine."""

    name: str
    pool: Any
    region: Region
    actor: Any

    @property
    def rows(self) -> Any:
        return self.region.array

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.pool.external_address)

    def checksum(self, slot: int) -> int:
        return Region.checksum(self.region, slot, KEYS[slot])

    def order(
        self,
        donor: Side,
        slots: Sequence[int],
        *,
        granted: Sequence[int] | None = None,
        lifetime: float = PATIENCE,
        **changes: Any,
    ) -> PullOrder:
        """An order for the rows that `donor` has `granted`, by default in the same slots. Slots
        outside of its memory are counted around."""
        granted = slots if granted is None else granted
        rows = [slot % ROWS for slot in granted]
        order = PullOrder(
            donor=donor.name,
            endpoint=donor.endpoint,
            granted=tuple(granted),
            expires=time.monotonic() + lifetime,
            keys=tuple(KEYS[slot] for slot in rows),
            checksums=tuple(donor.checksum(slot) for slot in rows),
            slots=tuple(slots),
            timeout=PATIENCE,
        )
        return order._replace(**changes)

    async def fetch(self, order: PullOrder) -> PullResult:
        """The result without its transport."""
        result: PullResult = await self.actor.pull(order)
        return result._replace(transport=None)

    async def pull(self, donor: Side, slots: Sequence[int], **how: Any) -> PullResult:
        return await self.fetch(self.order(donor, slots, **how))

    async def accept(self, hello: bytes, **changes: Any) -> bytes:
        """The answer to a consumer that asks for a link over Gloo."""
        asked = {"version": PROTOCOL_VERSION, "link_id": "id", "proof": prove(SECRET, "id")}
        asked |= {"row_bytes": ROW_BYTES, "consumer": "us", "transport": "gloo", "hello": hello}
        asked |= {"timeout": PATIENCE} | changes
        answer: bytes = await self.actor.open_link(*asked.values())
        return answer

    async def links(self) -> int:
        count: int = (await self.actor.stats())["links"]
        return count

    async def until_links(self, count: int) -> None:
        await self.until("links", count)

    async def until(self, figure: str, value: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while (await self.actor.stats())[figure] != value:  # noqa: ASYNC110  # not announced
                await asyncio.sleep(0.01)


class Sides:
    """Starts sides; the default transport is the plain one of `kind`."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.all: list[Side] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for side in self.all:
            await side.actor.close_links_except(NOBODY)
            await side.pool.stop()
            side.region.close()

    async def start(
        self,
        name: str,
        *transports: type[Transport],
        secret: bytes | None = SECRET,
        row_bytes: int = ROW_BYTES,
    ) -> Side:
        region = Region.create(ROWS, row_bytes)
        seed = len(self.all)
        region.array[:] = np.random.default_rng(seed).integers(0, 256, region.array.shape, np.uint8)
        pool = await listen(HOST, None)
        startup = Startup(name, region.fd, ROWS, row_bytes, HOST, None, ())
        made = [new(region, HOST, None) for new in transports or (self.kind.plain,)]
        actor = await xoscar.create_actor(
            TransferActor,
            startup,
            region,
            made,
            {"best": "no such device"},
            address=pool.external_address,
            uid=TRANSFER_UID,
        )
        if secret is not None:
            await actor.configure(secret)
        self.all.append(Side(name, pool, region, actor))
        return self.all[-1]

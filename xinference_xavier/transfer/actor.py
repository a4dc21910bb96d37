"""The actor of the transfer process: moves rows so that the engine need not.

Life cycle: created by `__main__.py` in a child process of the engine, and gone with it. It can die
by itself too: Gloo ends a process that is sent more than it asked for. Then its fetches roll back
and the engine starts another.

Threading: the actor runs on the process's event loop; each link has a thread of its own for what
blocks.
"""

import importlib
import logging
from dataclasses import asdict
from typing import Any

import xoscar

from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import Endpoint, PullOrder, PullResult, Startup, Ticket
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.transfer.links import LinkContext, LinkStats
from xinference_xavier.transfer.receiver import Receiver
from xinference_xavier.transfer.sender import Sender
from xinference_xavier.transfer.transports.base import Transport
from xinference_xavier.transfer.transports.selection import TransportSelector

logger = logging.getLogger(__name__)


class TransferActor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Pulls rows for its own engine and serves those that engine granted to peers."""

    def __init__(self, startup: Startup, region: Region, choice: TransportSelector) -> None:
        super().__init__()
        self._context = LinkContext(
            startup.incarnation,
            region,
            choice,
            {name: LinkStats() for name in choice.names},
            RateLimitedLog(logger),
        )
        self._receiver = Receiver(self._context)
        self._server = Sender(self._context, bytes.fromhex(startup.key))

    # -- asked by the own engine ------------------------------------------------------------

    async def configure(self, secret: bytes) -> None:
        """The model's secret, new with every tracker."""
        self._context.secret = secret

    async def stats(self) -> dict[str, Any]:
        """`transport` names those that have links, or all that might if there is no link yet."""
        linked_to = self._receiver.linked_to()
        links = [*linked_to.values(), *self._server.transports()]
        moved = self._context.moved
        for name, of_transport in moved.items():
            of_transport.links = links.count(name)
        used = [name for name, of_transport in moved.items() if of_transport.links]
        return {
            "transport": ", ".join(used or moved),
            "bytes_received": sum(of_one.bytes_received for of_one in moved.values()),
            "bytes_sent": sum(of_one.bytes_sent for of_one in moved.values()),
            "links": len(links),
            "transports": {name: asdict(of_transport) for name, of_transport in moved.items()},
            "linked_to": linked_to,
            "fallbacks": self._context.choice.fallbacks,
        }

    async def close_links_except(self, members: frozenset[str]) -> None:
        """All other replicas are gone: close their links."""
        await self._receiver.close_links_except(members)
        await self._server.close_links_except(members)

    async def pull(self, order: PullOrder) -> PullResult:
        """See `Receiver.pull`."""
        return await self._receiver.pull(order)

    async def probe_link(self, donor: str, endpoint: Endpoint, timeout: float) -> str | None:
        """See `Receiver.probe_link`."""
        return await self._receiver.probe_link(donor, endpoint, timeout)

    # -- asked by a peer's transfer process --------------------------------------------------

    async def open_link(
        self,
        version: int,
        link_id: str,
        consumer: str,
        transport: str,
        hello: bytes,
        timeout: float,
    ) -> bytes:
        """See `Sender.open_link`."""
        return await self._server.open_link(version, link_id, consumer, transport, hello, timeout)

    async def serve(
        self, version: int, link_id: str, ticket: Ticket, row_bytes: int, timeout: float
    ) -> None:
        """See `Sender.serve`."""
        await self._server.serve(version, link_id, ticket, row_bytes, timeout)


def load_transport(path: str) -> type[Transport]:
    """The class behind "module:Class"."""
    module, _, name = path.partition(":")
    loaded = getattr(importlib.import_module(module), name)
    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        raise TypeError(f"{path} is not a Transport")
    return loaded

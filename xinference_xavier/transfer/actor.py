"""The actor of the transfer process: moves rows, so that the engine does not have to.

Threading: the process's event loop. Blocking calls run on threads that all links share.
"""

import logging
import pkgutil
from dataclasses import asdict
from typing import Any

import xoscar

from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import Startup
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.transfer.links import LinkContext, LinkStats, Receiver, Sender
from xinference_xavier.transfer.transports.base import Transport
from xinference_xavier.transfer.transports.selection import TransportSelector

logger = logging.getLogger(__name__)


class TransferActor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Pulls rows for its own engine, and sends rows that the engine granted to peers."""

    def __init__(self, startup: Startup, region: Region, selector: TransportSelector) -> None:
        super().__init__()
        self._context = LinkContext(
            startup.incarnation,
            region,
            selector,
            {name: LinkStats() for name in selector.names},
            RateLimitedLog(logger),
        )
        self._receiver = Receiver(self._context)
        self._sender = Sender(self._context, bytes.fromhex(startup.key))
        # Called by our engine:
        self.pull = self._receiver.pull
        self.probe_link = self._receiver.probe_link
        # Called by a peer's transfer process:
        self.open_link = self._sender.open_link
        self.serve = self._sender.serve

    async def configure(self, secret: bytes) -> None:
        """Set the model's secret, which is new with every tracker."""
        self._context.secret = secret

    async def stats(self) -> dict[str, Any]:
        """`transport` names the transports with open links; all transports if there is no link."""
        linked_to = self._receiver.linked_to()
        links = [*linked_to.values(), *self._sender.transports()]
        stats = self._context.stats
        for name, of_transport in stats.items():
            of_transport.links = links.count(name)
        used = [name for name, of_transport in stats.items() if of_transport.links]
        return {
            "transport": ", ".join(used or stats),
            "bytes_sent": sum(of_transport.bytes_sent for of_transport in stats.values()),
            "links": len(links),
            "transports": {name: asdict(of_transport) for name, of_transport in stats.items()},
            "linked_to": linked_to,
            "fallbacks": self._context.selector.fallbacks,
        }

    async def close_links_except(self, members: frozenset[str]) -> None:
        """Close the links with replicas that are not members."""
        await self._receiver.close_links_except(members)
        await self._sender.close_links_except(members)


def load_transport(path: str) -> type[Transport]:
    """The class at "module:Class". Raises TypeError if it is not a Transport."""
    loaded = pkgutil.resolve_name(path)
    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        raise TypeError(f"{path} is not a Transport")
    return loaded

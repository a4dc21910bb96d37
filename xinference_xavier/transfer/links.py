"""What both directions of a transfer process's links share."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from xinference_xavier.pool.region import Region
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.transfer.transports.base import Link
from xinference_xavier.transfer.transports.selection import TransportSelector

MAX_LINKS = 256  # per direction


@dataclass
class LinkStats:
    """Totals of one transport."""

    links: int = 0  # open now
    fetches: int = 0  # as the consumer, that received rows
    bytes_received: int = 0
    bytes_sent: int = 0


@dataclass
class LinkContext:
    """The replica that the links belong to. `secret` is None until it has joined a tracker."""

    incarnation: str
    region: Region
    selector: TransportSelector
    stats: dict[str, LinkStats]  # by transport
    log: RateLimitedLog
    secret: bytes | None = None
    # For everything that blocks, except for closing. Each link has one blocked call at a time.
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2 * MAX_LINKS, "xavier-link")
    )


async def close_link(link: Link) -> None:
    """Close `link`, even if the caller is cancelled: nobody else would."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, link.close))

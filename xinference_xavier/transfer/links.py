"""What both directions of a transfer process's links share."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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


async def close_link(link: Link, thread: ThreadPoolExecutor) -> None:
    await asyncio.get_running_loop().run_in_executor(None, link.close)
    thread.shutdown(wait=False)

"""What both directions of a transfer process's links have in common.

Threading: all of it belongs to the process's event loop; each link has a thread of its own for what
blocks.
"""

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
    """By one transport."""

    links: int = 0  # at the moment
    fetches: int = 0  # of ours that moved rows
    bytes_received: int = 0
    bytes_sent: int = 0


@dataclass
class LinkContext:
    """The replica whose rows the links move. `secret` is None before it joined a tracker."""

    incarnation: str
    region: Region
    choice: TransportSelector
    moved: dict[str, LinkStats]  # by transport
    conditions: RateLimitedLog
    secret: bytes | None = None


async def close_link(link: Link, thread: ThreadPoolExecutor) -> None:
    await asyncio.get_running_loop().run_in_executor(None, link.close)
    thread.shutdown(wait=False)

"""Links on which this replica is the donor: it sends rows that its engine granted."""

import asyncio
import logging
import time
from typing import NamedTuple

from xinference_xavier.errors import LinkError, XavierError
from xinference_xavier.options import MAX_FETCH_TIMEOUT
from xinference_xavier.protocol.transfer import Ticket, check_ticket, check_version, checking
from xinference_xavier.runtime.rollback import Rollback
from xinference_xavier.runtime.validate import check_identifier, check_seconds
from xinference_xavier.transfer.links import MAX_LINKS, LinkContext, close_link
from xinference_xavier.transfer.transports.base import Acceptance, Link

logger = logging.getLogger(__name__)


class _AcceptedLink(NamedTuple):
    consumer: str
    transport: str
    link: asyncio.Task[Link | None]  # None: the consumer did not complete it


class Sender:
    """At most one complete link to each consumer. Our engine signs its tickets with `key`."""

    def __init__(self, context: LinkContext, key: bytes) -> None:
        self._context = context
        self._key = key
        self._links: dict[str, _AcceptedLink] = {}  # by id, the one used last at the end
        self._busy: set[str] = set()  # ids of links that carry a batch

    def transports(self) -> list[str]:
        """The transport of each link."""
        return [accepted.transport for accepted in self._links.values()]

    async def close_links_except(self, members: frozenset[str]) -> None:
        for consumer in {accepted.consumer for accepted in self._links.values()} - members:
            await self._close_all_to(consumer)

    async def open_link(
        self,
        version: int,
        link_id: str,
        consumer: str,
        transport: str,
        hello: bytes,
        timeout: float,
    ) -> bytes:
        """Accept a link from `consumer`; returns the answer that completes its side."""
        check_version(version)
        with checking("request for a link"):
            check_identifier("link_id", link_id)
            check_identifier("consumer", consumer)
            check_identifier("transport", transport)
            check_seconds("timeout", timeout, MAX_FETCH_TIMEOUT)
        if self._context.secret is None:
            raise LinkError("the donor has not joined a tracker yet")
        own = self._context.selector.named(transport)
        # A consumer has one link to us, and asks for another only after it has closed that one.
        await self._close_all_to(consumer)
        await self._make_room()
        if link_id in self._links:
            raise LinkError(f"there is a link {link_id} already")
        deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        half = own.accept(hello, self._context.secret, deadline)
        answering = loop.run_in_executor(self._context.threads, lambda: half.answer)
        link = asyncio.ensure_future(self._complete(link_id, half, answering, deadline))
        # Without an await since there was room, so that concurrent calls count it.
        self._links[link_id] = _AcceptedLink(consumer, own.name, link)
        return await answering

    async def _complete(
        self, link_id: str, half: Acceptance, answering: asyncio.Future[bytes], deadline: float
    ) -> Link | None:
        """The complete link; None if the consumer did not complete its side."""
        loop = asyncio.get_running_loop()
        try:
            async with Rollback() as scope:
                scope.undo(self._links.pop, link_id, None)
                scope.undo(loop.run_in_executor, None, half.withdraw)
                await asyncio.wait({answering})
                threads = self._context.threads
                link = await loop.run_in_executor(threads, half.complete, deadline)
                scope.commit()
            return link
        except XavierError as error:
            self._context.log.warn("link", "link not completed: id=%s error=%s", link_id, error)
            return None

    async def serve(
        self, version: int, link_id: str, ticket: Ticket, row_bytes: int, timeout: float
    ) -> None:
        """Send the rows of `ticket` over the link; returns once they have left our memory."""
        check_version(version)
        with checking("request for rows"):
            check_identifier("link_id", link_id)
            check_seconds("timeout", timeout, MAX_FETCH_TIMEOUT)
        ticket = check_ticket(ticket, self._context.region.rows)
        accepted = self._links.get(link_id)
        if accepted is None:
            raise LinkError("no such link")
        if link_id in self._busy:
            raise LinkError("the link carries a batch already")
        if row_bytes != self._context.region.row_bytes:
            raise LinkError(
                f"the consumer's rows have {row_bytes} bytes, the donor's "
                f"{self._context.region.row_bytes}"
            )
        if accepted.consumer != ticket.consumer or not ticket.is_valid(self._key, time.monotonic()):
            raise LinkError("the ticket is not valid for this link or has expired")
        deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        self._links[link_id] = self._links.pop(link_id)
        self._busy.add(link_id)
        try:
            link = await asyncio.shield(accepted.link)
            if link is None:
                raise LinkError("the link was not completed")
            await loop.run_in_executor(self._context.threads, link.send, ticket.slots, deadline)
        except BaseException:
            await self._close(link_id)
            raise
        finally:
            self._busy.discard(link_id)
        self._context.stats[accepted.transport].bytes_sent += len(ticket.slots) * row_bytes

    async def _make_room(self) -> None:
        """For one more link: close idle ones, those not used for longest first."""
        while len(self._links) >= MAX_LINKS:
            complete = (link_id for link_id, link in self._links.items() if link.link.done())
            idle = next((link_id for link_id in complete if link_id not in self._busy), None)
            if idle is None:
                raise LinkError(f"the donor's {MAX_LINKS} links are all in use")
            logger.debug("closing an idle link to make room: id=%s", idle)
            await self._close(idle)

    async def _close_all_to(self, consumer: str) -> None:
        for link_id, accepted in list(self._links.items()):
            # An incomplete link ends at its own deadline.
            if accepted.consumer == consumer and accepted.link.done():
                await self._close(link_id)

    async def _close(self, link_id: str) -> None:
        accepted = self._links.pop(link_id, None)
        if accepted is not None and accepted.link.done():
            link = accepted.link.result()
            if link is not None:
                await close_link(link)

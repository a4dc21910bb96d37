"""The links on which we are the donor: rows that our engine granted, sent.

Threading: belongs to the transfer process's event loop; what blocks runs on the link's thread.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from xinference_xavier.errors import LinkError, XavierError
from xinference_xavier.protocol.transfer import (
    MAX_TIMEOUT,
    Ticket,
    check_ticket,
    check_version,
    checking,
)
from xinference_xavier.runtime.rollback import Rollback
from xinference_xavier.runtime.validate import check_identifier, check_seconds
from xinference_xavier.transfer.links import MAX_LINKS, LinkContext, close_link
from xinference_xavier.transfer.transports.base import Acceptance, Link


class _Sending(NamedTuple):
    consumer: str
    transport: str
    link: asyncio.Task[Link | None]
    thread: ThreadPoolExecutor


class Sender:
    """At most one whole link to each consumer. `key` is what our engine signs its tickets with."""

    def __init__(self, home: LinkContext, key: bytes) -> None:
        self._context = home
        self._key = key
        self._serving: dict[str, _Sending] = {}  # by link id
        self._sending: set[str] = set()  # ids of links that carry a batch at the moment

    def transports(self) -> list[str]:
        """Of each link."""
        return [serving.transport for serving in self._serving.values()]

    async def close_links_except(self, members: frozenset[str]) -> None:
        """All other replicas are gone: close their links."""
        for consumer in {serving.consumer for serving in self._serving.values()} - members:
            await self._drop_to(consumer)

    async def open_link(
        self,
        version: int,
        link_id: str,
        consumer: str,
        transport: str,
        hello: bytes,
        timeout: float,
    ) -> bytes:
        """Begin a link to `consumer`; the answer completes the consumer's side."""
        check_version(version)
        with checking("request for a link"):
            check_identifier("link_id", link_id)
            check_identifier("consumer", consumer)
            check_identifier("transport", transport)
            check_seconds("timeout", timeout, MAX_TIMEOUT)
        if self._context.secret is None:
            raise LinkError("the donor has not joined a tracker yet")
        own = self._context.choice.named(transport)
        # A consumer has one link to us; it makes another when it has given up the one before.
        await self._drop_to(consumer)
        if link_id in self._serving:
            raise LinkError(f"there is a link {link_id} already")
        if len(self._serving) >= MAX_LINKS:
            raise LinkError(f"the donor serves {MAX_LINKS} links already")
        deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "xavier-serve")
        async with Rollback() as scope:
            scope.undo(thread.shutdown, False)
            half = own.accept(hello, self._context.secret, deadline)
            answering = loop.run_in_executor(thread, lambda: half.answer)
            link = asyncio.ensure_future(self._accept(link_id, half, thread, deadline))
            # Before anything is waited for: those that come meanwhile count it.
            self._serving[link_id] = _Sending(consumer, own.name, link, thread)
            scope.commit()
        return await answering

    async def _accept(
        self, link_id: str, half: Acceptance, thread: ThreadPoolExecutor, deadline: float
    ) -> Link | None:
        """The whole link; None for a consumer that did not come back for it."""
        loop = asyncio.get_running_loop()
        try:
            async with Rollback() as scope:
                scope.undo(thread.shutdown, False)
                scope.undo(self._serving.pop, link_id, None)
                scope.undo(loop.run_in_executor, None, half.withdraw)
                link = await loop.run_in_executor(thread, half.complete, deadline)
                scope.commit()
            return link
        except XavierError as error:
            self._context.conditions.warn("link", "link %s was not completed: %s", link_id, error)
            return None

    async def serve(
        self, version: int, link_id: str, ticket: Ticket, row_bytes: int, timeout: float
    ) -> None:
        """Send the rows of `ticket` over the link; returns when they have left."""
        check_version(version)
        with checking("request for rows"):
            check_identifier("link_id", link_id)
            check_seconds("timeout", timeout, MAX_TIMEOUT)
        ticket = check_ticket(ticket, self._context.region.rows)
        serving = self._serving.get(link_id)
        if serving is None:
            raise LinkError("no such link")
        if link_id in self._sending:
            raise LinkError("the link carries a batch already")
        if row_bytes != self._context.region.row_bytes:
            raise LinkError(
                f"rows of {row_bytes} bytes wanted, ours have {self._context.region.row_bytes}"
            )
        if serving.consumer != ticket.consumer or not ticket.is_valid(self._key, time.monotonic()):
            raise LinkError("the ticket is another's or has expired")
        deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        self._sending.add(link_id)
        try:
            link = await asyncio.shield(serving.link)
            if link is None:
                raise LinkError("the link was not completed")
            await loop.run_in_executor(serving.thread, link.send, ticket.slots, deadline)
        except BaseException:
            await self._drop(link_id)
            raise
        finally:
            self._sending.discard(link_id)
        self._context.moved[serving.transport].bytes_sent += len(ticket.slots) * row_bytes

    async def _drop_to(self, consumer: str) -> None:
        for link_id, serving in list(self._serving.items()):
            # One that is not complete yet ends by its own deadline, if nobody comes for it.
            if serving.consumer == consumer and serving.link.done():
                await self._drop(link_id)

    async def _drop(self, link_id: str) -> None:
        serving = self._serving.pop(link_id, None)
        if serving is not None and serving.link.done():
            link = serving.link.result()
            if link is not None:
                await close_link(link, serving.thread)

"""Links on which this replica is the consumer: it receives and verifies rows of donors."""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import xoscar

from xinference_xavier.errors import OUT_OF_REACH, LinkError
from xinference_xavier.protocol.transfer import (
    PROTOCOL_VERSION,
    TRANSFER_UID,
    Endpoint,
    PullOrder,
    PullResult,
    check_order,
)
from xinference_xavier.runtime.deadline import remaining, within
from xinference_xavier.runtime.rollback import Rollback
from xinference_xavier.runtime.tasks import spawn
from xinference_xavier.transfer.links import MAX_LINKS, LinkContext, close_link
from xinference_xavier.transfer.transports.base import Link, Transport
from xinference_xavier.transfer.transports.selection import OutOfReachError

logger = logging.getLogger(__name__)

_FIRST_TRY_SECONDS = 1.0
"""For the best transport if there is another; at most half of the time left."""


class ChecksumError(LinkError):
    """A complete row has the wrong content."""


class _OpenLink(NamedTuple):
    link_id: str
    address: str  # of the donor's transfer process
    peer: xoscar.ActorRefType  # its actor; kept, because finding it costs a round trip
    transport: str
    link: Link


@dataclass
class _Progress:
    """Of a pull."""

    verified: int = 0  # rows
    transport: str | None = None


class Receiver:
    """At most one link from each donor. A link carries one batch at a time."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self._links: dict[str, _OpenLink] = {}  # by donor, the one used last at the end
        # By donor; held while its link carries a batch.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def linked_to(self) -> dict[str, str]:
        """The transport of each donor's link."""
        return {donor: opened.transport for donor, opened in self._links.items()}

    async def close_links_except(self, members: frozenset[str]) -> None:
        self._context.selector.forget_except(members)
        for donor in self._links.keys() - members:
            await self._close(donor)

    async def pull(self, order: PullOrder) -> PullResult:
        """Fetch the rows of `order`. Never raises; when it returns, nothing writes to its rows."""
        try:
            order = check_order(order, self._context.region.rows)
        except LinkError as error:
            self._context.log.warn("order", "pull refused: error=%s", error)
            return PullResult(0, "malformed")
        deadline = time.monotonic() + order.timeout
        progress = _Progress()
        reason: str | None = None
        serving: asyncio.Future[None] | None = None
        lock = self._locks.setdefault(order.donor, asyncio.Lock())
        try:
            await asyncio.wait_for(lock.acquire(), order.timeout)
        except TimeoutError:
            return PullResult(0, "timeout")
        reused = order.donor in self._links
        try:
            try:
                serving = await self._pull(order, deadline, progress)
            except LinkError as error:
                # An idle link can break unnoticed. A new one shows whether the donor is alive.
                if not reused or progress.verified or isinstance(error, ChecksumError):
                    raise
                logger.debug("idle link broke: donor=%s error=%s", order.donor, error)
                await self._close(order.donor)
                serving = await self._pull(order, deadline, progress)
        except Exception as error:  # a peer's exception can have any type
            reason = _reason(error) if progress.verified < len(order.slots) else None
            await self._fail(order.donor, error)
        finally:
            if serving is None:
                lock.release()
            else:
                spawn(self._end_batch(order.donor, lock, serving))
        if progress.verified and progress.transport is not None:
            stats = self._context.stats[progress.transport]
            stats.fetches += 1
            stats.bytes_received += progress.verified * self._context.region.row_bytes
        return PullResult(progress.verified, reason, progress.transport)

    async def probe_link(self, donor: str, endpoint: Endpoint, timeout: float) -> str | None:
        """Open a link to `donor` unless there is one. Returns why it failed, or None."""
        deadline = time.monotonic() + timeout
        lock = self._locks.setdefault(donor, asyncio.Lock())
        if lock.locked():
            return None  # the link is in use
        async with lock:
            opened = self._links.get(donor)
            if opened is not None and opened.address == endpoint.address:
                return None
            try:
                await self._close(donor)
                candidates = self._context.selector.candidates(donor, *endpoint)
                await self._connect(donor, endpoint.address, candidates, deadline)
            except OutOfReachError as error:
                return str(error)
            except Exception as error:  # a peer's exception can have any type
                return f"no link to {endpoint.address}: {str(error) or type(error).__name__}"
        return None

    async def _end_batch(
        self, donor: str, lock: asyncio.Lock, serving: asyncio.Future[None]
    ) -> None:
        """Complete rows count at once; only the link's next batch waits for the donor to finish."""
        try:
            await serving
        except Exception as error:  # a peer's exception can have any type
            await self._fail(donor, error)
        finally:
            lock.release()

    async def _fail(self, donor: str, error: Exception) -> None:
        self._context.log.warn(f"pull from {donor}", "pull from %s failed: error=%s", donor, error)
        await self._close(donor)

    async def _pull(
        self, order: PullOrder, deadline: float, progress: _Progress
    ) -> asyncio.Future[None]:
        """Receive all rows. The future is done when the donor has finished the batch too."""
        opened = self._links.get(order.donor)
        if opened is None or opened.address != order.address:
            await self._close(order.donor)
            candidates = self._context.selector.candidates(order.donor, order.address, order.host)
            progress.transport = candidates[-1].name  # if none of them makes a link
            opened = await self._connect(order.donor, order.address, candidates, deadline)
        else:
            self._links[order.donor] = self._links.pop(order.donor)
        progress.transport = opened.transport

        wanted = dict(zip(order.slots, zip(order.keys, order.checksums, strict=True), strict=True))

        def check(slot: int) -> None:
            key, checksum = wanted[slot]
            if self._context.region.checksum(slot, key) != checksum:
                raise ChecksumError(f"the row of chunk {key.hex()[:16]} arrived damaged")

        def receive() -> None:
            granted = order.ticket.slots
            for _ in opened.link.receive(order.slots, granted, check, deadline):
                progress.verified += 1

        loop = asyncio.get_running_loop()
        receiving = loop.run_in_executor(self._context.threads, receive)
        served = opened.peer.serve(
            PROTOCOL_VERSION,
            opened.link_id,
            order.ticket,
            self._context.region.row_bytes,
            deadline - time.monotonic(),
        )
        serving = asyncio.ensure_future(within(remaining(deadline), served))
        try:
            await asyncio.wait({receiving, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # a refusal ends the wait at once
            await receiving
        except BaseException:
            serving.cancel()
            if not receiving.done():
                await loop.run_in_executor(None, opened.link.close)
                await asyncio.wait({receiving})
                receiving.exception()  # retrieved, but only the first error is reported
            raise
        return serving

    async def _connect(
        self, donor: str, address: str, candidates: Sequence[Transport], deadline: float
    ) -> _OpenLink:
        await self._make_room()
        peer = await within(remaining(deadline), xoscar.actor_ref(address, TRANSFER_UID))
        best, *others = candidates
        if not others:
            return await self._open(best, donor, address, peer, deadline)
        now = time.monotonic()
        first_deadline = now + min(_FIRST_TRY_SECONDS, (deadline - now) / 2)
        try:
            return await self._open(best, donor, address, peer, first_deadline)
        except Exception as error:  # a peer's exception can have any type
            opened = await self._open(others[0], donor, address, peer, deadline)
            self._context.selector.record_fallback(donor, address, error)
            return opened

    async def _open(
        self,
        transport: Transport,
        donor: str,
        address: str,
        peer: xoscar.ActorRefType,
        deadline: float,
    ) -> _OpenLink:
        if self._context.secret is None:
            raise LinkError("this replica has not joined a tracker yet")
        loop = asyncio.get_running_loop()
        threads = self._context.threads
        async with Rollback() as scope:
            offer = transport.offer(self._context.secret, deadline)
            scope.undo(loop.run_in_executor, None, offer.withdraw)
            link_id = os.urandom(8).hex()
            hello = await loop.run_in_executor(threads, lambda: offer.hello)
            timeout = deadline - time.monotonic()
            opening = peer.open_link(
                PROTOCOL_VERSION, link_id, self._context.incarnation, transport.name, hello, timeout
            )
            answer = await within(remaining(deadline), opening)
            link = await loop.run_in_executor(threads, offer.complete, answer, deadline)
            scope.commit()
        self._links[donor] = _OpenLink(link_id, address, peer, transport.name, link)
        return self._links[donor]

    async def _make_room(self) -> None:
        """Close idle links, those not used for longest first, until there may be one more for each
        donor whose lock is held, ours included."""
        while True:
            busy = {donor for donor, lock in self._locks.items() if lock.locked()}
            idle = [donor for donor in self._links if donor not in busy]
            if len(busy) + len(idle) <= MAX_LINKS:
                return
            if not idle:
                raise LinkError(f"all {MAX_LINKS} links are in use")
            logger.debug("closing an idle link to make room: donor=%s", idle[0])
            await self._close(idle[0])

    async def _close(self, donor: str) -> None:
        opened = self._links.pop(donor, None)
        if opened is not None:
            await close_link(opened.link)


def _reason(error: Exception) -> str:
    """The reason that a failed pull is counted under."""
    if isinstance(error, ChecksumError):
        return "checksum"
    # A peer's own words must not become labels of our metrics.
    if isinstance(error, OutOfReachError) and error.reason in OUT_OF_REACH:
        return error.reason
    return "timeout" if isinstance(error, TimeoutError) else "link"

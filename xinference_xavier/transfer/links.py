"""The links of a transfer process in both directions.

A `Sender` owns the links on which this replica is the donor: it sends rows that its engine granted.
A `Receiver` owns those on which it is the consumer: it receives and verifies rows of donors.
"""

import asyncio
import hmac
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import xoscar

from xinference_xavier.errors import LinkError, XavierError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import (
    PROTOCOL_VERSION,
    TRANSFER_UID,
    Endpoint,
    PullOrder,
    PullResult,
    check_slots,
    check_version,
    prove,
)
from xinference_xavier.runtime.aio import Rollback, remaining, spawn, within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.transfer.transports.base import Acceptance, Link, Transport

logger = logging.getLogger(__name__)

MAX_LINKS = 256  # per direction
RETRY_AFTER = 600.0
"""Seconds for which a link is used where a better transport failed."""


@dataclass
class LinkContext:
    """The replica that the links belong to. `secret` is None until it has joined a tracker."""

    incarnation: str
    region: Region
    transports: Mapping[str, Transport]  # best first
    unusable: Mapping[str, str]  # why this host cannot use better ones
    log: RateLimitedLog
    secret: bytes | None = None
    bytes_sent: int = 0
    # For everything that blocks, except for closing. Each link has one blocked call at a time.
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2 * MAX_LINKS, "xavier-link")
    )

    def named(self, transport: str) -> Transport:
        """The transport that a consumer asks for. Raises LinkError."""
        try:
            return self.transports[transport]
        except KeyError:
            offered = " or ".join(self.transports) or "none"
            raise LinkError(f"the donor offers {offered}, not {transport!r}") from None


async def close_link(link: Link) -> None:
    """Close `link`, even if the caller is cancelled: nobody else would."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, link.close))


class _AcceptedLink(NamedTuple):
    consumer: str
    transport: str
    link: asyncio.Task[Link | None]  # None: the consumer did not complete it


class Sender:
    """The donor's side: at most one complete link to each consumer."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
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
        proof: bytes,
        row_bytes: int,
        consumer: str,
        transport: str,
        hello: bytes,
        timeout: float,
    ) -> bytes:
        """Accept a link from `consumer`; returns the answer that completes its side. `proof` is
        that of the model's secret, `row_bytes` the size of the consumer's rows."""
        check_version(version)
        if self._context.secret is None:
            raise LinkError("the donor has not joined a tracker yet")
        if not hmac.compare_digest(proof, prove(self._context.secret, link_id)):
            raise LinkError("the consumer does not know this model's secret")
        own_bytes = self._context.region.row_bytes
        if row_bytes != own_bytes:  # a longer message than expected ends Gloo's process
            raise LinkError(
                f"the consumer's rows have {row_bytes} bytes, the donor's {own_bytes}; give the "
                "replicas the same options"
            )
        own = self._context.named(transport)
        # A consumer has one link to us, and asks for another only after it has closed that one.
        await self._close_all_to(consumer)
        await self._make_room()
        deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        half = own.accept(hello, deadline)
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
        self, link_id: str, granted: Sequence[int], expires: float, timeout: float
    ) -> None:
        """Send the rows in these slots over the link; returns once they have left our memory. The
        grant `expires` then, in monotonic seconds."""
        check_slots(granted, self._context.region.rows)
        accepted = self._links.get(link_id)
        if accepted is None:
            raise LinkError("no such link")
        if link_id in self._busy:
            raise LinkError("the link carries a batch already")
        if time.monotonic() >= expires:
            raise LinkError("the grant has expired")
        deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        self._links[link_id] = self._links.pop(link_id)
        self._busy.add(link_id)
        try:
            link = await asyncio.shield(accepted.link)
            if link is None:
                raise LinkError("the link was not completed")
            await loop.run_in_executor(self._context.threads, link.send, granted, deadline)
        except BaseException:
            await self._close(link_id)
            raise
        finally:
            self._busy.discard(link_id)
        self._context.bytes_sent += len(granted) * self._context.region.row_bytes

    async def _make_room(self) -> None:
        """Close idle links, least recently used first, until one more fits."""
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


class ChecksumError(LinkError):
    """A complete row has the wrong content."""


class _OpenLink(NamedTuple):
    link_id: str
    endpoint: Endpoint  # of the donor's transfer process
    peer: xoscar.ActorRefType  # its actor; kept, because finding it costs a round trip
    transport: str
    link: Link
    obstacles: dict[str, str]  # why not a better transport
    retry_at: float  # when a better one that failed is tried again


@dataclass
class _Progress:
    """How far a pull has come."""

    verified: int = 0  # rows
    transport: str | None = None


class Receiver:
    """The consumer's side: at most one link from each donor. A link carries one batch at a time."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self._links: dict[str, _OpenLink] = {}  # by donor, the one used last at the end
        # By donor; held while its link carries a batch.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def linked_to(self) -> dict[str, str]:
        """The transport of each donor's link."""
        return {donor: opened.transport for donor, opened in self._links.items()}

    def obstacles(self) -> dict[str, dict[str, str]]:
        """The reasons against better transports, for each donor's link."""
        return {donor: opened.obstacles for donor, opened in self._links.items()}

    async def close_links_except(self, members: frozenset[str]) -> None:
        for donor in self._links.keys() - members:
            await self._close(donor)

    async def pull(self, order: PullOrder) -> PullResult:
        """Fetch the rows of `order`. Never raises; when it returns, nothing writes to its rows."""
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
        return PullResult(progress.verified, reason, progress.transport)

    async def try_link(self, donor: str, endpoint: Endpoint, timeout: float) -> str | None:
        """Open a link to `donor` unless there is one. Returns why it failed, or None."""
        lock = self._locks.setdefault(donor, asyncio.Lock())
        if lock.locked():
            return None  # the link is in use
        async with lock:
            try:
                await self._linked(donor, endpoint, time.monotonic() + timeout, _Progress())
            except Exception as error:  # a peer's exception can have any type
                return str(error) or type(error).__name__
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
        opened = await self._linked(order.donor, order.endpoint, deadline, progress)
        wanted = dict(zip(order.slots, zip(order.keys, order.checksums, strict=True), strict=True))

        def check(slot: int) -> None:
            key, checksum = wanted[slot]
            if self._context.region.checksum(slot, key) != checksum:
                raise ChecksumError(f"the row of chunk {key.hex()[:16]} arrived damaged")

        def receive() -> None:
            for _ in opened.link.receive(order.slots, order.granted, check, deadline):
                progress.verified += 1

        loop = asyncio.get_running_loop()
        receiving = loop.run_in_executor(self._context.threads, receive)
        served = opened.peer.serve(
            opened.link_id, order.granted, order.expires, deadline - time.monotonic()
        )
        serving = asyncio.ensure_future(within(remaining(deadline), served))
        try:
            await asyncio.wait({receiving, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # a refusal ends the wait at once
            await receiving
        except BaseException:
            serving.cancel()
            # Late bytes end with the link, even if somebody else is closing it already.
            await close_link(opened.link)
            await asyncio.wait({receiving})
            receiving.exception()  # retrieved, but only the first error is reported
            raise
        return serving

    async def _linked(
        self, donor: str, endpoint: Endpoint, deadline: float, progress: _Progress
    ) -> _OpenLink:
        """The link from the donor's process at `endpoint`; opens it if there is none."""
        opened = self._links.pop(donor, None)
        if opened is not None:
            if opened.endpoint == endpoint and time.monotonic() < opened.retry_at:
                progress.transport = opened.transport
            else:
                await close_link(opened.link)
                opened = None
        if opened is None:
            opened = await self._connect(donor, endpoint, deadline, progress)
        self._links[donor] = opened
        return opened

    async def _connect(
        self, donor: str, endpoint: Endpoint, deadline: float, progress: _Progress
    ) -> _OpenLink:
        """Try the transports, best first: each with half of the time left, the last one with all
        of it."""
        obstacles = dict(self._context.unusable)
        *better, last = self._context.transports
        progress.transport = last
        await self._make_room()
        peer = await within(remaining(deadline), xoscar.actor_ref(endpoint.address, TRANSFER_UID))
        retry_at = math.inf
        for name in better:
            try:
                half = (time.monotonic() + deadline) / 2
                link_id, link = await self._open(name, peer, half)
                progress.transport = name
                break
            except Exception as error:  # a peer's exception can have any type
                obstacles[name] = str(error) or type(error).__name__
                retry_at = time.monotonic() + RETRY_AFTER
                text = "%s failed with donor %s, using another transport: error=%s"
                self._context.log.warn(f"{name} {donor}", text, name, donor, obstacles[name])
        else:
            link_id, link = await self._open(last, peer, deadline)
        return _OpenLink(link_id, endpoint, peer, progress.transport, link, obstacles, retry_at)

    async def _open(
        self, name: str, peer: xoscar.ActorRefType, deadline: float
    ) -> tuple[str, Link]:
        if self._context.secret is None:
            raise LinkError("this replica has not joined a tracker yet")
        loop = asyncio.get_running_loop()
        threads = self._context.threads
        async with Rollback() as scope:
            offer = self._context.transports[name].offer(deadline)
            scope.undo(loop.run_in_executor, None, offer.withdraw)
            link_id = os.urandom(8).hex()
            hello = await loop.run_in_executor(threads, lambda: offer.hello)
            opening = peer.open_link(
                PROTOCOL_VERSION,
                link_id,
                prove(self._context.secret, link_id),
                self._context.region.row_bytes,
                self._context.incarnation,
                name,
                hello,
                deadline - time.monotonic(),
            )
            answer = await within(remaining(deadline), opening)
            link = await loop.run_in_executor(threads, offer.complete, answer, deadline)
            scope.commit()
        return link_id, link

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
    return "timeout" if isinstance(error, TimeoutError) else "link"

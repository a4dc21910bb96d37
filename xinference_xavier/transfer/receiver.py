"""The links on which we are the consumer: rows of donors, received and verified.

Threading: belongs to the transfer process's event loop; what blocks runs on the link's thread.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

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

_HAND_OVER_TIME = 1.0
"""Seconds, and at most half of those that are left, for a link that can be made otherwise."""


class ChecksumError(LinkError):
    """A row arrived whole in length but not in content."""


class _Receiving(NamedTuple):
    link_id: str
    address: str  # of the donor's transfer process
    peer: xoscar.ActorRefType  # its actor: a reference to it costs a round trip
    transport: str
    link: Link
    thread: ThreadPoolExecutor


@dataclass
class _Progress:
    """Of a pull."""

    verified: int = 0  # rows
    transport: str | None = None


class Receiver:
    """At most one link from each donor, which carries one batch at a time."""

    def __init__(self, home: LinkContext) -> None:
        self._context = home
        self._pulling: dict[str, _Receiving] = {}  # by donor
        self._turns: dict[str, asyncio.Lock] = {}  # by donor: a link carries one batch at a time

    def linked_to(self) -> dict[str, str]:
        """Transports, by donor."""
        return {donor: pulling.transport for donor, pulling in self._pulling.items()}

    async def close_links_except(self, members: frozenset[str]) -> None:
        """All other replicas are gone: close their links."""
        self._turns = {
            donor: turn for donor, turn in self._turns.items() if donor in members or turn.locked()
        }
        self._context.choice.close_links_except(members)
        for donor in self._pulling.keys() - members:
            await self._drop(donor)

    async def pull(self, order: PullOrder) -> PullResult:
        """Fetch the rows of `order`; never raises, and never returns before they are at rest."""
        try:
            order = check_order(order, self._context.region.rows)
        except LinkError as error:
            self._context.conditions.warn("order", "pull refused: %s", error)
            return PullResult(0, "malformed")
        deadline = time.monotonic() + order.timeout
        progress = _Progress()
        reason: str | None = None
        serving: asyncio.Future[None] | None = None
        if len(self._turns) > MAX_LINKS:
            self._turns = {donor: turn for donor, turn in self._turns.items() if turn.locked()}
        turn = self._turns.setdefault(order.donor, asyncio.Lock())
        try:
            await asyncio.wait_for(turn.acquire(), order.timeout)
        except TimeoutError:
            return PullResult(0, "timeout")
        reused = order.donor in self._pulling
        try:
            try:
                serving = await self._pull(order, deadline, progress)
            except LinkError as error:
                # An idle link may have died unseen: a new one tells whether the donor did too.
                if not reused or progress.verified or isinstance(error, ChecksumError):
                    raise
                logger.debug("the link to %s was dead: %s", order.donor, error)
                await self._drop(order.donor)
                serving = await self._pull(order, deadline, progress)
        # Anything: what a peer raises arrives as whatever it is.
        except Exception as error:
            reason = _reason(error) if progress.verified < len(order.slots) else None
            self._warn(order.donor, error)
            await self._drop(order.donor)
        finally:
            if serving is None:
                turn.release()
            else:
                spawn(self._end_turn(order.donor, turn, serving))
        if progress.verified and progress.transport is not None:
            moved = self._context.moved[progress.transport]
            moved.fetches += 1
            moved.bytes_received += progress.verified * self._context.region.row_bytes
        return PullResult(progress.verified, reason, progress.transport)

    async def probe_link(self, donor: str, endpoint: Endpoint, timeout: float) -> str | None:
        """Open a link to `donor`, unless there is one; why that fails, None if it does not."""
        deadline = time.monotonic() + timeout
        turn = self._turns.setdefault(donor, asyncio.Lock())
        if turn.locked():
            return None  # rows are on their way
        async with turn:
            pulling = self._pulling.get(donor)
            if pulling is not None and pulling.address == endpoint.address:
                return None
            try:
                await self._drop(donor)
                candidates = self._context.choice.candidates(donor, *endpoint)
                await self._connect(donor, endpoint.address, candidates, deadline)
            except OutOfReachError as error:
                return str(error)
            except Exception as error:  # what a peer raises arrives as whatever it is
                return f"no link to {endpoint.address}: {str(error) or type(error).__name__}"
        return None

    async def _end_turn(
        self, donor: str, turn: asyncio.Lock, serving: asyncio.Future[None]
    ) -> None:
        """Nobody waits for the donor's word on rows that are whole but the link's next batch."""
        try:
            await serving
        except Exception as error:  # what a peer raises arrives as whatever it is
            self._warn(donor, error)
            await self._drop(donor)
        finally:
            turn.release()

    def _warn(self, donor: str, error: Exception) -> None:
        self._context.conditions.warn(f"pull from {donor}", "pull from %s failed: %s", donor, error)

    async def _pull(
        self, order: PullOrder, deadline: float, progress: _Progress
    ) -> asyncio.Future[None]:
        """Done when the donor is through with the batch too."""
        pulling = self._pulling.get(order.donor)
        if pulling is None or pulling.address != order.address:
            await self._drop(order.donor)
            candidates = self._context.choice.candidates(order.donor, order.address, order.host)
            progress.transport = candidates[-1].name  # if none of them makes a link
            pulling = await self._connect(order.donor, order.address, candidates, deadline)
        progress.transport = pulling.transport

        wanted = dict(zip(order.slots, zip(order.keys, order.checksums, strict=True), strict=True))

        def check(slot: int) -> None:
            key, checksum = wanted[slot]
            if self._context.region.checksum(slot, key) != checksum:
                raise ChecksumError(f"the row of chunk {key.hex()[:16]} arrived damaged")

        def receive() -> None:
            granted = order.ticket.slots
            for _ in pulling.link.receive(order.slots, granted, check, deadline):
                progress.verified += 1

        loop = asyncio.get_running_loop()
        receiving = loop.run_in_executor(pulling.thread, receive)
        served = pulling.peer.serve(
            PROTOCOL_VERSION,
            pulling.link_id,
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
                await loop.run_in_executor(None, pulling.link.close)
                await asyncio.wait({receiving})
                receiving.exception()  # the first error is the one that is reported
            raise
        return serving

    async def _connect(
        self,
        donor: str,
        address: str,
        candidates: Sequence[Transport],
        deadline: float,
    ) -> _Receiving:
        if len(self._pulling) >= MAX_LINKS:
            raise LinkError(f"{MAX_LINKS} links are open already")
        peer = await within(remaining(deadline), xoscar.actor_ref(address, TRANSFER_UID))
        best, *others = candidates
        if not others:
            return await self._link(best, donor, address, peer, deadline)
        now = time.monotonic()
        soon = now + min(_HAND_OVER_TIME, (deadline - now) / 2)
        try:
            return await self._link(best, donor, address, peer, soon)
        except Exception as error:  # what a peer raises arrives as whatever it is
            pulling = await self._link(others[0], donor, address, peer, deadline)
            self._context.choice.record_fallback(donor, address, error)
            return pulling

    async def _link(
        self,
        transport: Transport,
        donor: str,
        address: str,
        peer: xoscar.ActorRefType,
        deadline: float,
    ) -> _Receiving:
        if self._context.secret is None:
            raise LinkError("not joined to a tracker yet")
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "xavier-pull")
        async with Rollback() as scope:
            scope.undo(thread.shutdown, False)
            offer = transport.offer(self._context.secret, deadline)
            scope.undo(loop.run_in_executor, None, offer.withdraw)
            link_id = os.urandom(8).hex()
            hello = await loop.run_in_executor(thread, lambda: offer.hello)
            timeout = deadline - time.monotonic()
            opening = peer.open_link(
                PROTOCOL_VERSION, link_id, self._context.incarnation, transport.name, hello, timeout
            )
            answer = await within(remaining(deadline), opening)
            link = await loop.run_in_executor(thread, offer.complete, answer, deadline)
            scope.commit()
        self._pulling[donor] = _Receiving(link_id, address, peer, transport.name, link, thread)
        return self._pulling[donor]

    async def _drop(self, donor: str) -> None:
        pulling = self._pulling.pop(donor, None)
        if pulling is not None:
            await close_link(pulling.link, pulling.thread)


def _reason(error: BaseException) -> str:
    """What a failed pull is counted as."""
    if isinstance(error, ChecksumError):
        return "checksum"
    # A peer's own words would make our figures as large as it likes.
    if isinstance(error, OutOfReachError) and error.reason in OUT_OF_REACH:
        return error.reason
    if isinstance(error, TimeoutError):
        return "timeout"
    return "link"

"""The actor of the transfer process: moves rows so that the engine need not.

Life cycle: created by `__main__.py` in a child process of the engine, and gone with it. It can die
by itself too: Gloo ends a process that is sent more than it asked for. Then its fetches roll back
and the engine starts another.

Threading: the actor runs on the process's event loop; each link has a thread of its own for what
blocks.
"""

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import xoscar

from xinference_xavier.checks import check_identifier, check_seconds
from xinference_xavier.conditions import Conditions
from xinference_xavier.deadline import within
from xinference_xavier.errors import OUT_OF_REACH, LinkError, XavierError
from xinference_xavier.pool.region import Region
from xinference_xavier.rollback import Rollback
from xinference_xavier.transfer.base import Acceptance, Link, Transport
from xinference_xavier.transfer.choice import Choice, OutOfReachError
from xinference_xavier.transfer.messages import (
    MAX_TIMEOUT,
    PROTOCOL_VERSION,
    Contact,
    PullOrder,
    PullResult,
    Startup,
    Ticket,
    check_order,
    check_ticket,
    check_version,
    checking,
)

logger = logging.getLogger(__name__)

UID = "xavier-transfer"
MAX_LINKS = 256  # per direction
_HAND_OVER_TIME = 1.0
"""Seconds, and at most half of those that are left, for a link that can be made otherwise."""
_T = TypeVar("_T")


class ChecksumError(LinkError):
    """A row arrived whole in length but not in content."""


class _Pulling(NamedTuple):
    """A link on which we are the consumer."""

    link_id: str
    address: str  # of the donor's transfer process
    transport: str
    link: Link
    thread: ThreadPoolExecutor


class _Serving(NamedTuple):
    """A link on which we are the donor."""

    consumer: str
    transport: str
    link: asyncio.Task[Link | None]
    thread: ThreadPoolExecutor


@dataclass
class _Moved:
    """By one transport."""

    links: int = 0  # at the moment
    fetches: int = 0  # of ours that moved rows
    bytes_received: int = 0
    bytes_sent: int = 0


@dataclass
class _Progress:
    """Of a pull."""

    verified: int = 0  # rows
    transport: str | None = None


class TransferActor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Pulls rows for its own engine and serves those that engine granted to peers."""

    def __init__(self, startup: Startup, region: Region, choice: Choice) -> None:
        super().__init__()
        self._incarnation = startup.incarnation
        self._key = bytes.fromhex(startup.key)
        self._region = region
        self._choice = choice
        self._secret: bytes | None = None
        self._pulling: dict[str, _Pulling] = {}  # by donor
        self._serving: dict[str, _Serving] = {}  # by link id
        self._sending: set[str] = set()  # ids of links that carry a batch at the moment
        self._turns: dict[str, asyncio.Lock] = {}  # by donor: a link carries one batch at a time
        self._moved = {name: _Moved() for name in choice.names}
        self._conditions = Conditions(logger)

    # -- asked by the own engine ------------------------------------------------------------

    async def configure(self, secret: bytes) -> None:
        """The model's secret, new with every tracker."""
        self._secret = secret

    async def stats(self) -> dict[str, Any]:
        """`transport` names those that have links, or all that might if there is no link yet."""
        links = [link.transport for link in self._pulling.values()]
        links += [link.transport for link in self._serving.values()]
        for name, moved in self._moved.items():
            moved.links = links.count(name)
        used = [name for name, moved in self._moved.items() if moved.links]
        return {
            "transport": ", ".join(used or self._moved),
            "bytes_received": sum(moved.bytes_received for moved in self._moved.values()),
            "bytes_sent": sum(moved.bytes_sent for moved in self._moved.values()),
            "links": len(links),
            "transports": {name: asdict(moved) for name, moved in self._moved.items()},
            "linked_to": {donor: link.transport for donor, link in self._pulling.items()},
            "fallbacks": self._choice.fallbacks,
        }

    async def keep(self, members: frozenset[str]) -> None:
        """All other replicas are gone: close their links."""
        self._turns = {
            donor: turn for donor, turn in self._turns.items() if donor in members or turn.locked()
        }
        self._choice.keep(members)
        for donor in self._pulling.keys() - members:
            await self._drop_pulling(donor)
        for consumer in {serving.consumer for serving in self._serving.values()} - members:
            await self._drop_serving_to(consumer)

    async def pull(self, order: PullOrder) -> PullResult:
        """Fetch the rows of `order`; never raises, and never returns before they are at rest."""
        try:
            check_order(order, self._region.rows)
        except LinkError as error:
            self._conditions.warn("order", "pull refused: %s", error)
            return PullResult(0, "malformed")
        deadline = time.monotonic() + order.timeout
        progress = _Progress()
        reason: str | None = None
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
                await self._pull(order, deadline, progress)
            except LinkError as error:
                # An idle link may have died unseen: a new one tells whether the donor did too.
                if not reused or progress.verified or isinstance(error, ChecksumError):
                    raise
                logger.debug("the link to %s was dead: %s", order.donor, error)
                await self._drop_pulling(order.donor)
                await self._pull(order, deadline, progress)
        # Anything: what a peer raises arrives as whatever it is.
        except Exception as error:
            reason = _reason(error) if progress.verified < len(order.slots) else None
            self._conditions.warn(
                f"pull from {order.donor}", "pull from %s failed: %s", order.donor, error
            )
            await self._drop_pulling(order.donor)
        finally:
            turn.release()
        if progress.verified and progress.transport is not None:
            moved = self._moved[progress.transport]
            moved.fetches += 1
            moved.bytes_received += progress.verified * self._region.row_bytes
        return PullResult(progress.verified, reason, progress.transport)

    async def reach(self, donor: str, contact: Contact, timeout: float) -> str | None:
        """Open a link to `donor`, unless there is one; why that fails, None if it does not."""
        deadline = time.monotonic() + timeout
        turn = self._turns.setdefault(donor, asyncio.Lock())
        if turn.locked():
            return None  # rows are on their way
        async with turn:
            pulling = self._pulling.get(donor)
            if pulling is not None and pulling.address == contact.address:
                return None
            try:
                await self._drop_pulling(donor)
                peer = await _before(deadline, xoscar.actor_ref(contact.address, UID))
                candidates = self._choice.candidates(donor, *contact)
                await self._connect(donor, contact.address, candidates, peer, deadline)
            except OutOfReachError as error:
                return str(error)
            except Exception as error:  # what a peer raises arrives as whatever it is
                return f"no link to {contact.address}: {str(error) or type(error).__name__}"
        return None

    async def _pull(self, order: PullOrder, deadline: float, progress: _Progress) -> None:
        peer = await _before(deadline, xoscar.actor_ref(order.address, UID))
        pulling = self._pulling.get(order.donor)
        if pulling is None or pulling.address != order.address:
            await self._drop_pulling(order.donor)
            candidates = self._choice.candidates(order.donor, order.address, order.host)
            progress.transport = candidates[-1].name  # if none of them makes a link
            pulling = await self._connect(order.donor, order.address, candidates, peer, deadline)
        progress.transport = pulling.transport

        def receive() -> None:
            slots = pulling.link.receive(order.slots, deadline)
            for slot, key, checksum in zip(slots, order.keys, order.checksums, strict=True):
                if self._region.checksum(slot, key) != checksum:
                    raise ChecksumError(f"the row of chunk {key.hex()[:16]} arrived damaged")
                progress.verified += 1

        loop = asyncio.get_running_loop()
        receiving = loop.run_in_executor(pulling.thread, receive)
        served = peer.serve(
            PROTOCOL_VERSION,
            pulling.link_id,
            order.ticket,
            self._region.row_bytes,
            deadline - time.monotonic(),
        )
        serving = asyncio.ensure_future(_before(deadline, served))
        try:
            await asyncio.wait({receiving, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # a refusal ends the wait at once
            await receiving
            await serving  # until then, the link is not free for the next batch
        finally:
            serving.cancel()
            if not receiving.done():
                await loop.run_in_executor(None, pulling.link.close)
                await asyncio.wait({receiving})
                receiving.exception()  # the first error is the one that is reported

    async def _connect(
        self,
        donor: str,
        address: str,
        candidates: Sequence[Transport],
        peer: xoscar.ActorRefType["TransferActor"],
        deadline: float,
    ) -> _Pulling:
        if len(self._pulling) >= MAX_LINKS:
            raise LinkError(f"{MAX_LINKS} links are open already")
        best, *others = candidates
        if not others:
            return await self._link(best, donor, address, peer, deadline)
        now = time.monotonic()
        soon = now + min(_HAND_OVER_TIME, (deadline - now) / 2)
        try:
            return await self._link(best, donor, address, peer, soon)
        except Exception as error:  # what a peer raises arrives as whatever it is
            pulling = await self._link(others[0], donor, address, peer, deadline)
            self._choice.fell_back(donor, address, error)
            return pulling

    async def _link(
        self,
        transport: Transport,
        donor: str,
        address: str,
        peer: xoscar.ActorRefType["TransferActor"],
        deadline: float,
    ) -> _Pulling:
        if self._secret is None:
            raise LinkError("not joined to a tracker yet")
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "xavier-pull")
        async with Rollback() as scope:
            scope.undo(thread.shutdown, False)
            offer = transport.offer(self._secret, deadline)
            scope.undo(loop.run_in_executor, None, offer.withdraw)
            link_id = os.urandom(8).hex()
            hello = await loop.run_in_executor(thread, lambda: offer.hello)
            timeout = deadline - time.monotonic()
            opening = peer.open_link(
                PROTOCOL_VERSION, link_id, self._incarnation, transport.name, hello, timeout
            )
            answer = await _before(deadline, opening)
            link = await loop.run_in_executor(thread, offer.complete, answer, deadline)
            scope.commit()
        pulling = self._pulling[donor] = _Pulling(link_id, address, transport.name, link, thread)
        return pulling

    async def _drop_pulling(self, donor: str) -> None:
        pulling = self._pulling.pop(donor, None)
        if pulling is not None:
            await _close(pulling.link, pulling.thread)

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
        """Begin a link to `consumer`; the answer completes the consumer's side."""
        check_version(version)
        with checking("request for a link"):
            check_identifier("link_id", link_id)
            check_identifier("consumer", consumer)
            check_identifier("transport", transport)
            check_seconds("timeout", timeout, MAX_TIMEOUT)
        if self._secret is None:
            raise LinkError("the donor has not joined a tracker yet")
        own = self._choice.named(transport)
        # A consumer has one link to us; it makes another when it has given up the one before.
        await self._drop_serving_to(consumer)
        if link_id in self._serving:
            raise LinkError(f"there is a link {link_id} already")
        if len(self._serving) >= MAX_LINKS:
            raise LinkError(f"the donor serves {MAX_LINKS} links already")
        deadline = time.monotonic() + timeout
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "xavier-serve")
        async with Rollback() as scope:
            scope.undo(thread.shutdown, False)
            half = own.accept(hello, self._secret, deadline)
            answering = loop.run_in_executor(thread, lambda: half.answer)
            link = asyncio.ensure_future(self._accept(link_id, half, thread, deadline))
            # Before anything is waited for: those that come meanwhile count it.
            self._serving[link_id] = _Serving(consumer, own.name, link, thread)
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
            self._conditions.warn("link", "link %s was not completed: %s", link_id, error)
            return None

    async def serve(
        self, version: int, link_id: str, ticket: Ticket, row_bytes: int, timeout: float
    ) -> None:
        """Send the rows of `ticket` over the link; returns when they have left."""
        check_version(version)
        with checking("request for rows"):
            check_identifier("link_id", link_id)
            check_seconds("timeout", timeout, MAX_TIMEOUT)
        check_ticket(ticket, self._region.rows)
        serving = self._serving.get(link_id)
        if serving is None:
            raise LinkError("no such link")
        if link_id in self._sending:
            raise LinkError("the link carries a batch already")
        if row_bytes != self._region.row_bytes:
            raise LinkError(f"rows of {row_bytes} bytes wanted, ours have {self._region.row_bytes}")
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
            await self._drop_serving(link_id)
            raise
        finally:
            self._sending.discard(link_id)
        self._moved[serving.transport].bytes_sent += len(ticket.slots) * row_bytes

    async def _drop_serving_to(self, consumer: str) -> None:
        for link_id, serving in list(self._serving.items()):
            # One that is not complete yet ends by its own deadline, if nobody comes for it.
            if serving.consumer == consumer and serving.link.done():
                await self._drop_serving(link_id)

    async def _drop_serving(self, link_id: str) -> None:
        serving = self._serving.pop(link_id, None)
        if serving is not None and serving.link.done():
            link = serving.link.result()
            if link is not None:
                await _close(link, serving.thread)


async def _close(link: Link, thread: ThreadPoolExecutor) -> None:
    await asyncio.get_running_loop().run_in_executor(None, link.close)
    thread.shutdown(wait=False)


async def _before(deadline: float, call: Awaitable[_T]) -> _T:
    return await within(max(0.001, deadline - time.monotonic()), call)


def _reason(error: BaseException) -> str:
    """What a failed pull is counted as."""
    if isinstance(error, ChecksumError):
        return "checksum"
    # A peer's own words would make our figures as large as it likes.
    if isinstance(error, OutOfReachError) and error.reason in OUT_OF_REACH:
        return error.reason
    if isinstance(error, TimeoutError) or "timed out" in str(error).lower():
        return "timeout"
    return "link"


def load_transport(path: str) -> type[Transport]:
    """The class behind "module:Class"."""
    module, _, name = path.partition(":")
    loaded = getattr(importlib.import_module(module), name)
    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        raise TypeError(f"{path} is not a Transport")
    return loaded

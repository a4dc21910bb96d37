"""Rows are sent to whoever has a valid ticket for them, and to nobody else."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.transfer.sides import HOST, NOBODY, PATIENCE, ROW_BYTES, ROWS, SECRET, Kind, Side, Sides
from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import PROTOCOL_VERSION, PullResult, Ticket
from xinference_xavier.transfer import links
from xinference_xavier.transfer.links import close_link
from xinference_xavier.transfer.transports.shared_memory import DonorLink


async def test_without_a_valid_ticket_nothing_is_sent(consumer: Side, donor: Side) -> None:
    """Over shared memory, nothing has to be sent."""
    before = consumer.rows.copy()
    for ticket in (
        consumer.ticket(consumer, [0]),  # of another engine
        donor.ticket(donor, [0]),  # for another consumer
        donor.ticket(consumer, [1])._replace(slots=(0,)),
        donor.ticket(consumer, [0], lifetime=-1),
    ):
        assert (await consumer.pull(donor, [0], ticket=ticket))[:2] == (0, "link")
    assert np.array_equal(consumer.rows, before)
    assert (await donor.actor.stats())["bytes_sent"] == 0
    assert (await consumer.pull(donor, [0]))[:2] == (1, None), "the next fetch is unharmed"


NO_NAMES = ("", "x" * 257, None, 7, [])


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("version", 99, "speaks transfer protocol 99"),
        *(("link_id", name, "malformed") for name in NO_NAMES),
        *(("consumer", name, "malformed") for name in NO_NAMES),
        *(("transport", name, "malformed") for name in NO_NAMES),
        *(("timeout", wrong, "malformed") for wrong in (0.0, -1.0, float("inf"), float("nan"))),
        *(("ticket", wrong, "malformed ticket") for wrong in (None, ("consumer", (0,), 1e9, b""))),
    ],
    ids=lambda value: f"{value!r:.10}",
)
async def test_a_call_is_checked_before_anything_is_done(
    donor: Side, field: str, value: Any, complaint: str
) -> None:
    opening = {"version": PROTOCOL_VERSION, "link_id": "id", "consumer": "consumer"}
    opening |= {"transport": "gloo", "hello": b"{}", "timeout": 1.0}
    serving = {"version": PROTOCOL_VERSION, "link_id": "id", "ticket": donor.ticket(donor, [0])}
    serving |= {"row_bytes": ROW_BYTES, "timeout": 1.0}
    for method, given in ((donor.actor.open_link, opening), (donor.actor.serve, serving)):
        if field in given:
            with pytest.raises(LinkError, match=complaint):
                await method(*(given | {field: value}).values())


async def test_a_stranger_who_names_a_consumer_does_not_close_its_link(
    consumer: Side, donor: Side, kind: Kind
) -> None:
    await consumer.pull(donor, [0])
    for hello in (b"n" * 48, None):
        with pytest.raises(LinkError, match=r"secret|malformed"):
            await donor.actor.open_link(
                PROTOCOL_VERSION, "another", "consumer", kind.plain.name, hello, 1.0
            )
    assert await donor.links() == 1


async def test_the_link_that_was_not_used_for_longest_makes_room(
    sides: Sides, donor: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 2)
    closed, close = [], links.Sender._close

    async def closing(self: links.Sender, link_id: str) -> None:
        closed.append(self._links[link_id].consumer)
        await close(self, link_id)

    monkeypatch.setattr(links.Sender, "_close", closing)
    first, second, third = [await sides.start(name) for name in ("first", "second", "third")]
    for number, consumer in enumerate((first, second, first, third)):
        assert await consumer.pull(donor, [number]) == PullResult(1, None)
        await donor.until("bytes_sent", (number + 1) * ROW_BYTES)
    assert closed == ["second"]
    assert await second.pull(donor, [4]) == PullResult(1, None), "it is not refused for ever"
    assert await donor.links() == 2


async def test_links_that_are_asked_for_at_the_same_time_are_bounded_too(
    sides: Sides, donor: Side, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts from the first moment, not from when it is made."""
    monkeypatch.setattr(links, "MAX_LINKS", 2)
    region = Region.create(ROWS, ROW_BYTES)
    transport = kind.plain(region, HOST, None)
    offers = [transport.offer(SECRET, time.monotonic() + 1.0) for _ in range(6)]
    hellos = await asyncio.gather(*(asyncio.to_thread(lambda o=o: o.hello) for o in offers))
    answers = await asyncio.gather(
        *(
            donor.actor.open_link(
                PROTOCOL_VERSION, f"{n}", f"consumer {n}", kind.plain.name, hello, 1.0
            )
            for n, hello in enumerate(hellos)
        ),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, LinkError)]
    assert len(refused) == 4
    assert all("the donor's 2 links are all in use" in str(error) for error in refused)
    await donor.until_links(0)  # nobody comes for the others
    for offer in offers:
        offer.withdraw()
    region.close()


async def test_a_link_carries_one_batch_at_a_time(sides: Sides, kind: Kind) -> None:
    """Whoever asks for more would have them wait without a bound."""
    donor = await sides.start("donor", kind.stalling)
    region = Region.create(ROWS, ROW_BYTES)
    deadline = time.monotonic() + PATIENCE
    offer = kind.stallable(region, HOST, None).offer(SECRET, deadline)
    hello = await asyncio.to_thread(lambda: offer.hello)
    opening = donor.actor.open_link(PROTOCOL_VERSION, "id", "us", kind.plain.name, hello, PATIENCE)
    answer = await opening
    link = await asyncio.to_thread(offer.complete, answer, deadline)
    ticket = Ticket.sign(donor.key, "us", range(8), deadline)
    serve = (PROTOCOL_VERSION, "id", ticket, ROW_BYTES, PATIENCE)
    first = asyncio.ensure_future(donor.actor.serve(*serve))
    arriving = link.receive(range(8), range(8), lambda slot: None, deadline)
    assert await asyncio.to_thread(next, arriving) == 0
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LinkError, match="carries a batch already"):
            await donor.actor.serve(*serve)
    assert not first.done()
    await donor.actor.close_links_except(NOBODY)
    with pytest.raises(LinkError):
        await first
    link.close()
    region.close()


async def test_a_link_is_closed_even_if_whoever_closes_it_is_cancelled() -> None:
    """A consumer may withdraw its request while its donor gives the link up."""
    go_on, closed = threading.Event(), threading.Event()

    class Telling(DonorLink):
        def close(self) -> None:
            closed.set()

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, go_on.wait, PATIENCE)
    closing = asyncio.ensure_future(close_link(Telling()))
    await asyncio.sleep(0)  # it has begun
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    go_on.set()
    await busy
    assert closed.wait(PATIENCE)


async def test_rows_are_sent_on_links_that_there_are(donor: Side, consumer: Side) -> None:
    """Whoever guesses the name of a link that another consumer has gets nothing."""
    await consumer.pull(donor, [0])
    for link_id in ("0" * 16, consumer.name):
        ticket = donor.ticket(donor, [0])
        with pytest.raises(LinkError, match="no such link"):
            await donor.actor.serve(PROTOCOL_VERSION, link_id, ticket, ROW_BYTES, 1.0)


async def test_a_slot_outside_the_region_is_not_sent_even_if_it_was_signed(
    consumer: Side, donor: Side
) -> None:
    """A negative one would be counted from the end."""
    for slot in (-1, ROWS):
        ticket = Ticket.sign(donor.key, consumer.name, [slot], time.monotonic() + PATIENCE)
        with pytest.raises(LinkError, match="slots"):
            await donor.actor.serve(PROTOCOL_VERSION, "id", ticket, ROW_BYTES, 1.0)

"""Rows are sent over links of replicas of the model, as long as they are granted."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.transfer.sides import HOST, NOBODY, PATIENCE, ROW_BYTES, ROWS, SECRET, Kind, Side, Sides
from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import PullResult, prove
from xinference_xavier.transfer import links
from xinference_xavier.transfer.links import close_link
from xinference_xavier.transfer.transports.base import Link


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": 99}, "run the same version of xinference-xavier everywhere"),
        ({"proof": prove(b"other", "id")}, "does not know this model's secret"),
        ({"link_id": "another"}, "does not know this model's secret"),
        ({"row_bytes": 2 * ROW_BYTES}, "give the replicas the same options"),
    ],
    ids=["version", "secret", "proof of another link", "size"],
)
async def test_a_link_that_is_refused_closes_none(
    consumer: Side, donor: Side, changes: dict[str, Any], complaint: str
) -> None:
    await consumer.pull(donor, [0])
    with pytest.raises(LinkError, match=complaint):
        await donor.accept(b"", consumer="consumer", **changes)
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
    offers = [transport.offer(time.monotonic() + 1.0) for _ in range(6)]
    hellos = await asyncio.gather(*(asyncio.to_thread(lambda o=o: o.hello) for o in offers))
    answers = await asyncio.gather(
        *(
            donor.accept(
                hello, link_id=f"{n}", proof=prove(SECRET, f"{n}"), consumer=f"{n}", timeout=1.0
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
    offer = kind.stallable(region, HOST, None).offer(deadline)
    answer = await donor.accept(await asyncio.to_thread(lambda: offer.hello))
    link = await asyncio.to_thread(offer.complete, answer, deadline)
    serve = ("id", range(8), deadline, PATIENCE)
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

    class Telling(Link):
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
    await consumer.pull(donor, [0])
    with pytest.raises(LinkError, match="no such link"):
        await donor.actor.serve("0" * 16, [0], time.monotonic() + PATIENCE, 1.0)

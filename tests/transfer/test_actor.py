"""Two transfer actors with real links between them: what moves, what is refused, what is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import xoscar

from tests.faults import (
    CORRUPT_ROW,
    ROWS_BEFORE_STALL,
    CorruptingGloo,
    LingeringGloo,
    StallingGloo,
)
from xinference_xavier.errors import LinkError
from xinference_xavier.network import listen
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer import actor as actor_module
from xinference_xavier.transfer.actor import UID, TransferActor, load_transport
from xinference_xavier.transfer.base import Transport
from xinference_xavier.transfer.gloo import GlooTransport
from xinference_xavier.transfer.messages import (
    PROTOCOL_VERSION,
    PullOrder,
    PullResult,
    Startup,
    Ticket,
)

HOST = "127.0.0.1"
ROWS, ROW_BYTES = 32, 16 << 10
SECRET = b"s" * 32
KEYS = tuple(bytes([n]) * 36 for n in range(ROWS))
PATIENCE = 30.0


class Side:
    """One replica's transfer actor, and what its engine knows."""

    def __init__(self, name: str, pool: Any, region: Region, actor: Any, key: bytes) -> None:
        self.name = name
        self.pool = pool
        self.region = region
        self.actor = actor
        self.key = key

    @property
    def rows(self) -> Any:
        return self.region.array

    def ticket(self, consumer: Side, slots: Sequence[int], lifetime: float = PATIENCE) -> Ticket:
        return Ticket.sign(self.key, consumer.name, slots, time.monotonic() + lifetime)

    def checksum(self, slot: int) -> int:
        return Region.checksum(self.region, slot, KEYS[slot])

    def order(self, donor: Side, slots: Sequence[int], **changes: Any) -> PullOrder:
        """For the rows in `slots` of `donor` into the same slots here."""
        order = PullOrder(
            donor=donor.name,
            address=donor.pool.external_address,
            ticket=donor.ticket(self, slots),
            keys=tuple(KEYS[slot] for slot in slots),
            checksums=tuple(donor.checksum(slot) for slot in slots),
            slots=tuple(slots),
            timeout=PATIENCE,
        )
        return order._replace(**changes)

    async def pull(self, donor: Side, slots: Sequence[int], **changes: Any) -> PullResult:
        result: PullResult = await self.actor.pull(self.order(donor, slots, **changes))
        return result

    async def links(self) -> int:
        count: int = (await self.actor.stats())["links"]
        return count

    async def until_links(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.links() != count:  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.01)


class Sides:
    def __init__(self) -> None:
        self.all: list[Side] = []

    async def start(
        self,
        name: str,
        transport: type[Transport] = GlooTransport,
        secret: bytes | None = SECRET,
        row_bytes: int = ROW_BYTES,
    ) -> Side:
        region = Region.create(ROWS, row_bytes)
        seed = len(self.all)
        region.array[:] = np.random.default_rng(seed).integers(0, 256, region.array.shape, np.uint8)
        pool = await listen(HOST, None)
        key = name.encode().ljust(32)
        startup = Startup(name, region.fd, ROWS, row_bytes, HOST, None, "", key.hex())
        actor = await xoscar.create_actor(
            TransferActor,
            startup,
            region,
            transport(region, HOST, None),
            address=pool.external_address,
            uid=UID,
        )
        if secret is not None:
            await actor.configure(secret)
        self.all.append(Side(name, pool, region, actor, key))
        return self.all[-1]


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    sides = Sides()
    yield sides
    for side in sides.all:
        for other in sides.all:
            await side.actor.forget(other.name)
        await side.pool.stop()
        side.region.close()


@pytest.fixture
async def donor(sides: Sides) -> Side:
    return await sides.start("donor")


@pytest.fixture
async def consumer(sides: Sides) -> Side:
    return await sides.start("consumer")


async def test_rows_are_pulled_verified_and_counted(consumer: Side, donor: Side) -> None:
    assert (await consumer.pull(donor, [3, 1, 2]))[:2] == (3, None)
    assert np.array_equal(consumer.rows[1:4], donor.rows[1:4])
    assert not np.array_equal(consumer.rows[4], donor.rows[4])
    assert await consumer.actor.stats() == {
        "transport": "gloo",
        "bytes_received": 3 * ROW_BYTES,
        "bytes_sent": 0,
        "links": 1,
    }
    assert (await donor.actor.stats())["bytes_sent"] == 3 * ROW_BYTES


async def test_a_link_is_made_once_and_used_again(consumer: Side, donor: Side) -> None:
    for slot in range(5):
        assert (await consumer.pull(donor, [slot]))[:2] == (1, None)
    assert await consumer.links() == await donor.links() == 1


async def test_a_link_stays_good_if_the_consumer_is_done_first(
    sides: Sides, consumer: Side
) -> None:
    """What the donor has not finished yet must not be cancelled: that would close the link."""
    donor = await sides.start("donor", LingeringGloo)
    for slot in range(3):
        assert (await consumer.pull(donor, [slot]))[:2] == (1, None)
    assert await consumer.links() == await donor.links() == 1


async def test_fetches_at_the_same_time_take_turns_on_a_link(consumer: Side, donor: Side) -> None:
    pulls = (consumer.pull(donor, [n, n + 1]) for n in range(0, ROWS, 2))
    assert set(await asyncio.gather(*pulls)) == {PullResult(2, None, "gloo")}
    assert np.array_equal(consumer.rows, donor.rows)
    assert await consumer.links() == 1


async def test_both_directions_at_the_same_time(consumer: Side, donor: Side) -> None:
    there, back = list(range(16)), list(range(16, ROWS))
    results = await asyncio.gather(consumer.pull(donor, there), donor.pull(consumer, back))
    assert results == [PullResult(16, None, "gloo")] * 2
    assert np.array_equal(consumer.rows, donor.rows)


async def test_pulls_that_go_wrong_are_logged_once_for_each_donor(
    sides: Sides, donor: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted where they are ordered."""
    consumer = await sides.start("consumer", CorruptingGloo)
    other = await sides.start("other")
    caplog.clear()
    for _ in range(3):
        for side in (donor, other):
            assert (await consumer.pull(side, range(5))).reason == "checksum"
    logged = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert [line.split(" failed")[0] for line in logged] == ["pull from donor", "pull from other"]


async def test_a_damaged_row_ends_the_run_of_whole_rows(sides: Sides, donor: Side) -> None:
    consumer = await sides.start("consumer", CorruptingGloo)
    assert (await consumer.pull(donor, range(5)))[:2] == (CORRUPT_ROW, "checksum")
    assert await consumer.links() == 0, "whoever sends damaged rows gets a new link"


async def test_another_chunks_row_is_not_taken_for_the_one_asked_for(
    consumer: Side, donor: Side
) -> None:
    donor.rows[7] = donor.rows[6]
    order = consumer.order(donor, [6])
    swapped = order._replace(ticket=donor.ticket(consumer, [7]), keys=(KEYS[7],))
    assert (await consumer.actor.pull(swapped))[:2] == (0, "checksum")


async def test_failed_links_leave_nothing_behind(sides: Sides, donor: Side) -> None:
    """Else a donor would refuse everybody after so many failures of anybody."""
    consumer = await sides.start("consumer", CorruptingGloo)
    for _ in range(4):
        await consumer.pull(donor, range(4))
    assert await donor.links() <= 1


@pytest.mark.parametrize("secrets", [(SECRET, b"other"), (None, SECRET), (SECRET, None)])
async def test_who_does_not_know_the_secret_moves_nothing(
    sides: Sides, secrets: tuple[bytes | None, bytes | None]
) -> None:
    consumer = await sides.start("consumer", secret=secrets[0])
    donor = await sides.start("donor", secret=secrets[1])
    before = consumer.rows.copy()
    assert (await consumer.pull(donor, [0, 1]))[:2] == (0, "link")
    assert np.array_equal(consumer.rows, before)
    assert await consumer.links() == 0
    await donor.until_links(0)  # its half ends in its own time


def forgeries(consumer: Side, donor: Side) -> dict[str, Ticket]:
    good = donor.ticket(consumer, [0])
    return {
        "of another engine": consumer.ticket(consumer, [0]),
        "for another consumer": donor.ticket(donor, [0]),
        "other slots": good._replace(slots=(1,)),
        "expired": donor.ticket(consumer, [0], lifetime=-1),
    }


@pytest.mark.parametrize(
    "forgery", ["of another engine", "for another consumer", "other slots", "expired"]
)
async def test_without_a_valid_ticket_nothing_is_sent(
    consumer: Side, donor: Side, forgery: str
) -> None:
    before = consumer.rows.copy()
    ticket = forgeries(consumer, donor)[forgery]
    assert (await consumer.pull(donor, [0], ticket=ticket))[:2] == (0, "link")
    assert np.array_equal(consumer.rows, before)
    assert (await donor.actor.stats())["bytes_sent"] == 0
    assert (await consumer.pull(donor, [0]))[:2] == (1, None), "the next fetch is unharmed"


async def test_rows_of_another_size_are_refused_before_they_can_do_harm(
    sides: Sides, consumer: Side
) -> None:
    """A longer message than was asked for would end the receiving process."""
    donor = await sides.start("donor", row_bytes=2 * ROW_BYTES)
    assert (await consumer.pull(donor, [0]))[:2] == (0, "link")


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_peers_time_limit_is_checked(donor: Side, timeout: float) -> None:
    with pytest.raises(LinkError, match="malformed"):
        await donor.actor.open_link(PROTOCOL_VERSION, "id", "consumer", b"{}", timeout)
    ticket = donor.ticket(donor, [0])
    with pytest.raises(LinkError, match="malformed"):
        await donor.actor.serve(PROTOCOL_VERSION, "id", ticket, ROW_BYTES, timeout)


async def test_another_protocol_version_is_refused(donor: Side) -> None:
    with pytest.raises(LinkError, match="speaks transfer protocol 99"):
        await donor.actor.open_link(99, "id", "consumer", b"{}", 1.0)
    with pytest.raises(LinkError, match="speaks transfer protocol 99"):
        await donor.actor.serve(99, "id", donor.ticket(donor, [0]), ROW_BYTES, 1.0)


async def test_links_are_bounded(
    sides: Sides, consumer: Side, donor: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "MAX_LINKS", 1)
    one_more = await sides.start("one more")
    assert (await consumer.pull(donor, [0]))[:2] == (1, None)
    assert (await one_more.pull(donor, [0]))[:2] == (0, "link")
    await donor.actor.forget("consumer")
    assert (await one_more.pull(donor, [0]))[:2] == (1, None)


async def test_links_that_are_asked_for_at_the_same_time_are_bounded_too(
    sides: Sides, donor: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts from the first moment, not from when it is made."""
    monkeypatch.setattr(actor_module, "MAX_LINKS", 2)
    region = Region.create(ROWS, ROW_BYTES)
    gloo = GlooTransport(region, HOST, None)
    offers = [gloo.offer(SECRET, time.monotonic() + 1.0) for _ in range(6)]
    hellos = await asyncio.gather(*(asyncio.to_thread(lambda o=o: o.hello) for o in offers))
    answers = await asyncio.gather(
        *(
            donor.actor.open_link(PROTOCOL_VERSION, f"{n}", f"consumer {n}", hello, 1.0)
            for n, hello in enumerate(hellos)
        ),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, LinkError)]
    assert len(refused) == 4
    assert all("serves 2 links already" in str(error) for error in refused)
    await donor.until_links(0)  # nobody comes for the others
    region.close()


async def test_a_link_carries_one_batch_at_a_time(sides: Sides) -> None:
    """Whoever asks for more would have them wait without a bound."""
    donor = await sides.start("donor", StallingGloo)
    region = Region.create(ROWS, ROW_BYTES)
    deadline = time.monotonic() + PATIENCE
    offer = GlooTransport(region, HOST, None).offer(SECRET, deadline)
    hello = await asyncio.to_thread(lambda: offer.hello)
    answer = await donor.actor.open_link(PROTOCOL_VERSION, "id", "us", hello, PATIENCE)
    link = await asyncio.to_thread(offer.complete, answer, deadline)
    ticket = Ticket.sign(donor.key, "us", range(8), deadline)
    serve = (PROTOCOL_VERSION, "id", ticket, ROW_BYTES, PATIENCE)
    first = asyncio.ensure_future(donor.actor.serve(*serve))
    arriving = link.receive(range(8), deadline)
    assert await asyncio.to_thread(next, arriving) == 0
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LinkError, match="carries a batch already"):
            await donor.actor.serve(*serve)
    assert not first.done()
    await donor.actor.forget("us")
    with pytest.raises(LinkError):
        await first
    link.close()
    region.close()


async def test_an_order_that_cannot_be_is_refused_and_touches_no_row(
    consumer: Side, donor: Side
) -> None:
    before = consumer.rows.copy()
    good = consumer.order(donor, [0, 1])
    for order in (
        good._replace(slots=(0, ROWS)),
        good._replace(slots=(0, -1)),
        good._replace(slots=(0, 0)),
        good._replace(slots=(0,)),
        good._replace(address="nowhere"),
        good._replace(timeout=float("nan")),
    ):
        assert (await consumer.actor.pull(order))[:2] == (0, "malformed")
    assert np.array_equal(consumer.rows, before)
    assert (await consumer.actor.pull(good))[:2] == (2, None)


class _Lying(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A donor's transfer actor that raises what it likes, or answers with what it likes."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._answer = answer

    async def open_link(self, *arguments: object) -> object:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    "answer",
    [KeyError("x"), TypeError("y"), ZeroDivisionError(), AssertionError(), None, 7, b"", b"{}", []],
    ids=repr,
)
async def test_whatever_a_donor_answers_the_pull_ends_in_order(
    consumer: Side, donor: Side, answer: object
) -> None:
    """An exception would look to the engine as if its transfer process had died."""
    pool = await listen(HOST, None)
    await xoscar.create_actor(_Lying, answer, address=pool.external_address, uid=UID)
    order = consumer.order(donor, [0])._replace(donor="liar", address=pool.external_address)
    assert (await consumer.actor.pull(order))[:2] == (0, "link")
    assert await consumer.links() == 0
    assert (await consumer.pull(donor, [0]))[:2] == (1, None)
    await pool.stop()


@pytest.mark.parametrize("name", ["", "x" * 257, None, 7, []], ids=lambda name: f"{name!r:.9}")
async def test_a_peers_names_are_checked(donor: Side, name: Any) -> None:
    for link_id, consumer in ((name, "consumer"), ("id", name)):
        with pytest.raises(LinkError, match="malformed"):
            await donor.actor.open_link(PROTOCOL_VERSION, link_id, consumer, b"{}", 1.0)
    ticket = donor.ticket(donor, [0])
    with pytest.raises(LinkError, match="malformed"):
        await donor.actor.serve(PROTOCOL_VERSION, name, ticket, ROW_BYTES, 1.0)


@pytest.mark.parametrize(
    "ticket",
    [None, ("consumer", (0,), 1e9, b"")],
    ids=["none", "tuple"],
)
async def test_a_ticket_is_looked_at_before_it_is_verified(donor: Side, ticket: Any) -> None:
    with pytest.raises(LinkError, match="malformed ticket"):
        await donor.actor.serve(PROTOCOL_VERSION, "id", ticket, ROW_BYTES, 1.0)


async def test_a_slot_outside_the_region_is_not_sent_even_if_it_was_signed(
    consumer: Side, donor: Side
) -> None:
    """A negative one would be counted from the end."""
    for slot in (-1, ROWS):
        ticket = Ticket.sign(donor.key, consumer.name, [slot], time.monotonic() + PATIENCE)
        with pytest.raises(LinkError, match="slots"):
            await donor.actor.serve(PROTOCOL_VERSION, "id", ticket, ROW_BYTES, 1.0)


async def test_a_forgotten_replica_has_no_links(consumer: Side, donor: Side) -> None:
    await consumer.pull(donor, [0])
    await consumer.actor.forget("donor")
    await donor.actor.forget("consumer")
    assert await consumer.links() == await donor.links() == 0
    assert (await consumer.pull(donor, [1]))[:2] == (1, None)


async def test_a_link_that_died_while_idle_costs_nothing(consumer: Side, donor: Side) -> None:
    """As when our lease ended while we were cut off: the donor closed it and nobody told us."""
    await consumer.pull(donor, [0])
    await donor.actor.forget("consumer")
    assert (await consumer.pull(donor, [1]))[:2] == (1, None)


async def test_a_stalled_donor_costs_the_time_limit_and_not_what_has_arrived(
    sides: Sides, consumer: Side
) -> None:
    donor = await sides.start("donor", StallingGloo)
    result = await consumer.pull(donor, range(8), timeout=0.5)
    assert result[:2] == (ROWS_BEFORE_STALL, "timeout")
    assert await consumer.links() == 0


async def test_who_waits_for_a_turn_waits_no_longer_than_its_own_limit(
    sides: Sides, consumer: Side
) -> None:
    """The engine would take a longer silence for a dead process."""
    donor = await sides.start("donor", StallingGloo)
    first = asyncio.ensure_future(consumer.pull(donor, range(8)))
    await consumer.until_links(1)
    assert (await consumer.pull(donor, [9], timeout=0.05))[:2] == (0, "timeout")
    assert not first.done()
    await donor.actor.forget("consumer")
    assert (await first).reason == "link"


async def test_a_donor_that_is_not_there_is_a_failed_pull(
    sides: Sides, consumer: Side, donor: Side
) -> None:
    sides.all.remove(donor)
    await xoscar.destroy_actor(donor.actor)
    assert (await consumer.pull(donor, [0]))[:2] == (0, "link")
    await donor.pool.stop()
    assert (await consumer.pull(donor, [0]))[:2] == (0, "link")


def test_a_transport_is_found_by_its_path() -> None:
    assert load_transport("xinference_xavier.transfer.gloo:GlooTransport") is GlooTransport
    for wrong in ("xinference_xavier.transfer.gloo:GlooLink", "json:dumps"):
        with pytest.raises(TypeError, match="is not a Transport"):
            load_transport(wrong)

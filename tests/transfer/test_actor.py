"""Two transfer actors with real links between them: what moves, what is refused, what is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import xoscar

from tests import faults
from tests.faults import CORRUPT_ROW, ROWS_BEFORE_STALL
from xinference_xavier.errors import LinkError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import (
    PROTOCOL_VERSION,
    TRANSFER_UID,
    Endpoint,
    PullOrder,
    PullResult,
    Startup,
    Ticket,
)
from xinference_xavier.runtime.net import listen
from xinference_xavier.transfer import sender
from xinference_xavier.transfer.actor import TransferActor, load_transport
from xinference_xavier.transfer.transports.base import Acceptance, Check, Transport
from xinference_xavier.transfer.transports.gloo import GlooTransport
from xinference_xavier.transfer.transports.selection import TransportSelector
from xinference_xavier.transfer.transports.shared_memory import SharedMemoryTransport

HOST = "127.0.0.1"
ROWS, ROW_BYTES = 32, 16 << 10
SECRET = b"s" * 32
KEYS = tuple(bytes([n]) * 36 for n in range(ROWS))
PATIENCE = 30.0
NOBODY: frozenset[str] = frozenset()


class Kind(NamedTuple):
    """A transport, and the same with one fault each."""

    plain: type[Transport]
    corrupting: type[Transport]
    lingering: type[Transport]
    stalling: type[Transport]
    stallable: type[Transport]  # a consumer of it is stalled by a donor of that


KINDS = {
    "gloo": Kind(
        GlooTransport,
        faults.CorruptingGloo,
        faults.LingeringGloo,
        faults.StallingGloo,
        GlooTransport,
    ),
    "shared_memory": Kind(
        SharedMemoryTransport,
        faults.CorruptingSharedMemory,
        faults.LingeringSharedMemory,
        faults.StallingSharedMemory,
        faults.StallableSharedMemory,
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each of them must keep every promise below."""
    return KINDS[request.param]


class Side:
    """One replica's transfer actor, and what its engine knows."""

    def __init__(
        self, name: str, pool: Any, region: Region, actor: Any, key: bytes, host: str | None
    ) -> None:
        self.name = name
        self.pool = pool
        self.region = region
        self.actor = actor
        self.key = key
        self.host = host

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
            host=donor.host,
            ticket=donor.ticket(self, slots),
            keys=tuple(KEYS[slot] for slot in slots),
            checksums=tuple(donor.checksum(slot) for slot in slots),
            slots=tuple(slots),
            timeout=PATIENCE,
        )
        return order._replace(**changes)

    async def pull(self, donor: Side, slots: Sequence[int], **changes: Any) -> PullResult:
        """But for the transport."""
        result: PullResult = await self.actor.pull(self.order(donor, slots, **changes))
        return result._replace(transport=None)

    async def links(self) -> int:
        count: int = (await self.actor.stats())["links"]
        return count

    async def until_links(self, count: int) -> None:
        await self.until("links", count)

    async def until(self, figure: str, value: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while (await self.actor.stats())[figure] != value:  # noqa: ASYNC110  # not announced
                await asyncio.sleep(0.01)


class Sides:
    """Those that are not told otherwise have the plain transport of `kind`."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.all: list[Side] = []

    async def start(
        self,
        name: str,
        *transports: type[Transport],
        secret: bytes | None = SECRET,
        row_bytes: int = ROW_BYTES,
    ) -> Side:
        region = Region.create(ROWS, row_bytes)
        seed = len(self.all)
        region.array[:] = np.random.default_rng(seed).integers(0, 256, region.array.shape, np.uint8)
        pool = await listen(HOST, None)
        key = name.encode().ljust(32)
        startup = Startup(name, region.fd, ROWS, row_bytes, HOST, None, (), key.hex())
        choice = TransportSelector(
            [new(region, HOST, None) for new in transports or (self.kind.plain,)]
        )
        actor = await xoscar.create_actor(
            TransferActor,
            startup,
            region,
            choice,
            address=pool.external_address,
            uid=TRANSFER_UID,
        )
        if secret is not None:
            await actor.configure(secret)
        self.all.append(Side(name, pool, region, actor, key, choice.host))
        return self.all[-1]


@pytest.fixture
async def sides(kind: Kind) -> AsyncIterator[Sides]:
    sides = Sides(kind)
    yield sides
    for side in sides.all:
        await side.actor.close_links_except(NOBODY)
        await side.pool.stop()
        side.region.close()


@pytest.fixture
async def donor(sides: Sides) -> Side:
    return await sides.start("donor")


@pytest.fixture
async def consumer(sides: Sides) -> Side:
    return await sides.start("consumer")


async def test_rows_are_pulled_verified_and_counted(
    consumer: Side, donor: Side, kind: Kind
) -> None:
    assert await consumer.pull(donor, [3, 1, 2]) == PullResult(3, None)
    assert np.array_equal(consumer.rows[1:4], donor.rows[1:4])
    assert not np.array_equal(consumer.rows[4], donor.rows[4])
    name = kind.plain.name
    moved = {"links": 1, "fetches": 1, "bytes_received": 3 * ROW_BYTES, "bytes_sent": 0}
    assert await consumer.actor.stats() == {
        "transport": name,
        "bytes_received": 3 * ROW_BYTES,
        "bytes_sent": 0,
        "links": 1,
        "transports": {name: moved},
        "linked_to": {"donor": name},
        "fallbacks": 0,
    }
    assert (await consumer.actor.pull(consumer.order(donor, [4]))).transport == name
    await donor.until("bytes_sent", 4 * ROW_BYTES)


async def test_a_link_is_made_once_and_used_again(consumer: Side, donor: Side) -> None:
    for slot in range(5):
        assert (await consumer.pull(donor, [slot]))[:2] == (1, None)
    assert await consumer.links() == await donor.links() == 1


async def test_a_link_stays_good_if_the_consumer_is_done_first(
    sides: Sides, consumer: Side, kind: Kind
) -> None:
    """What the donor has not finished yet must not be cancelled: that would close the link."""
    donor = await sides.start("donor", kind.lingering)
    for slot in range(3):
        assert (await consumer.pull(donor, [slot]))[:2] == (1, None)
    assert await consumer.links() == await donor.links() == 1


def with_link(kind: Kind, link: type[faults._FaultyLink]) -> type[Transport]:
    return type("Made", (kind.lingering,), {"link": link})


async def test_whole_rows_do_not_wait_for_the_donors_word_but_the_links_next_batch_does(
    sides: Sides, consumer: Side, kind: Kind
) -> None:
    go_on = threading.Event()

    class Held(faults._FaultyLink):
        def send(self, slots: Sequence[int], deadline: float) -> None:
            self.link.send(slots, deadline)
            go_on.wait()

    donor = await sides.start("donor", with_link(kind, Held))
    assert await consumer.pull(donor, [1]) == PullResult(1, None)
    assert await consumer.links() == 1, "nothing went wrong"
    second = asyncio.ensure_future(consumer.pull(donor, [2]))
    assert (await consumer.pull(donor, [3], timeout=0.05))[:2] == (0, "timeout")
    assert not second.done()
    go_on.set()
    assert await second == PullResult(1, None)
    assert await consumer.links() == await donor.links() == 1


async def test_whole_rows_count_whatever_the_donor_says_of_them_afterwards(
    sides: Sides, consumer: Side, kind: Kind
) -> None:
    """Such a link carries nothing more."""

    class Late(faults._FaultyLink):
        def send(self, slots: Sequence[int], deadline: float) -> None:
            self.link.send(slots, deadline)
            raise LinkError("an afterthought")

    donor = await sides.start("donor", with_link(kind, Late))
    for slot in range(2):
        assert await consumer.pull(donor, [slot]) == PullResult(1, None)
        await consumer.until_links(0)


async def test_fetches_at_the_same_time_take_turns_on_a_link(consumer: Side, donor: Side) -> None:
    pulls = (consumer.pull(donor, [n, n + 1]) for n in range(0, ROWS, 2))
    assert set(await asyncio.gather(*pulls)) == {PullResult(2, None)}
    assert np.array_equal(consumer.rows, donor.rows)
    assert await consumer.links() == 1


async def test_both_directions_at_the_same_time(consumer: Side, donor: Side) -> None:
    there, back = list(range(16)), list(range(16, ROWS))
    results = await asyncio.gather(consumer.pull(donor, there), donor.pull(consumer, back))
    assert results == [PullResult(16, None)] * 2
    assert np.array_equal(consumer.rows, donor.rows)


async def test_pulls_that_go_wrong_are_logged_once_for_each_donor(
    sides: Sides, donor: Side, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted where they are ordered."""
    consumer = await sides.start("consumer", kind.corrupting)
    other = await sides.start("other")
    caplog.clear()
    for _ in range(3):
        for side in (donor, other):
            assert (await consumer.pull(side, range(5))).reason == "checksum"
    logged = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert [line.split(" failed")[0] for line in logged] == ["pull from donor", "pull from other"]


async def test_a_damaged_row_ends_the_run_of_whole_rows(
    sides: Sides, donor: Side, kind: Kind
) -> None:
    consumer = await sides.start("consumer", kind.corrupting)
    assert await consumer.pull(donor, range(5)) == PullResult(CORRUPT_ROW, "checksum")
    assert await consumer.links() == 0, "whoever sends damaged rows gets a new link"


async def test_another_chunks_row_is_not_taken_for_the_one_asked_for(
    consumer: Side, donor: Side
) -> None:
    donor.rows[7] = donor.rows[6]
    order = consumer.order(donor, [6])
    swapped = order._replace(ticket=donor.ticket(consumer, [7]), keys=(KEYS[7],))
    result = await consumer.actor.pull(swapped)
    assert (result.verified, result.reason) == (0, "checksum")


async def test_failed_links_leave_nothing_behind(sides: Sides, donor: Side, kind: Kind) -> None:
    """Else a donor would refuse everybody after so many failures of anybody."""
    consumer = await sides.start("consumer", kind.corrupting)
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
@pytest.mark.parametrize("kind", ["gloo"], indirect=True)
async def test_without_a_valid_ticket_nothing_is_sent(
    consumer: Side, donor: Side, forgery: str
) -> None:
    """Over shared memory, nothing has to be sent."""
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
        await donor.actor.open_link(PROTOCOL_VERSION, "id", "consumer", "gloo", b"{}", timeout)
    ticket = donor.ticket(donor, [0])
    with pytest.raises(LinkError, match="malformed"):
        await donor.actor.serve(PROTOCOL_VERSION, "id", ticket, ROW_BYTES, timeout)


async def test_another_protocol_version_is_refused(donor: Side) -> None:
    with pytest.raises(LinkError, match="speaks transfer protocol 99"):
        await donor.actor.open_link(99, "id", "consumer", "gloo", b"{}", 1.0)
    with pytest.raises(LinkError, match="speaks transfer protocol 99"):
        await donor.actor.serve(99, "id", donor.ticket(donor, [0]), ROW_BYTES, 1.0)


async def test_links_are_bounded(
    sides: Sides, consumer: Side, donor: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_LINKS", 1)
    one_more = await sides.start("one more")
    assert (await consumer.pull(donor, [0]))[:2] == (1, None)
    assert (await one_more.pull(donor, [0]))[:2] == (0, "link")
    await donor.actor.close_links_except(NOBODY)
    assert (await one_more.pull(donor, [0]))[:2] == (1, None)


async def test_links_that_are_asked_for_at_the_same_time_are_bounded_too(
    sides: Sides, donor: Side, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts from the first moment, not from when it is made."""
    monkeypatch.setattr(sender, "MAX_LINKS", 2)
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
    assert all("serves 2 links already" in str(error) for error in refused)
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
    assert (await consumer.actor.pull(good)).verified == 2


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
    await xoscar.create_actor(_Lying, answer, address=pool.external_address, uid=TRANSFER_UID)
    order = consumer.order(donor, [0])._replace(donor="liar", address=pool.external_address)
    assert (await consumer.actor.pull(order))[:2] == (0, "link")
    assert await consumer.links() == 0
    assert (await consumer.pull(donor, [0]))[:2] == (1, None)
    await pool.stop()


@pytest.mark.parametrize("name", ["", "x" * 257, None, 7, []], ids=lambda name: f"{name!r:.9}")
async def test_a_peers_names_are_checked(donor: Side, name: Any) -> None:
    good = ("id", "consumer", "gloo")
    for wrong in ((name, *good[1:]), ("id", name, "gloo"), (*good[:2], name)):
        with pytest.raises(LinkError, match="malformed"):
            await donor.actor.open_link(PROTOCOL_VERSION, *wrong, b"{}", 1.0)
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


async def test_only_those_that_are_kept_have_links(
    sides: Sides, consumer: Side, donor: Side
) -> None:
    other = await sides.start("other")
    await consumer.pull(donor, [0])
    await other.pull(donor, [0])
    await consumer.actor.close_links_except(frozenset({"other"}))
    await donor.actor.close_links_except(frozenset({"other"}))
    assert (await consumer.links(), await donor.links(), await other.links()) == (0, 1, 1)
    assert (await consumer.pull(donor, [1]))[:2] == (1, None)


async def test_a_link_that_died_while_idle_costs_nothing(consumer: Side, donor: Side) -> None:
    """As when our lease ended while we were cut off: the donor closed it and nobody told us."""
    await consumer.pull(donor, [0])
    await donor.actor.close_links_except(NOBODY)
    assert (await consumer.pull(donor, [1]))[:2] == (1, None)


async def test_a_stalled_donor_costs_the_time_limit_and_not_what_has_arrived(
    sides: Sides, kind: Kind
) -> None:
    consumer = await sides.start("consumer", kind.stallable)
    donor = await sides.start("donor", kind.stalling)
    result = await consumer.pull(donor, range(8), timeout=0.5)
    assert result[:2] == (ROWS_BEFORE_STALL, "timeout")
    assert await consumer.links() == 0


async def test_who_waits_for_a_turn_waits_no_longer_than_its_own_limit(
    sides: Sides, kind: Kind
) -> None:
    """The engine would take a longer silence for a dead process."""
    consumer = await sides.start("consumer", kind.stallable)
    donor = await sides.start("donor", kind.stalling)
    first = asyncio.ensure_future(consumer.pull(donor, range(8)))
    await consumer.until_links(1)
    assert (await consumer.pull(donor, [9], timeout=0.05))[:2] == (0, "timeout")
    assert not first.done()
    await donor.actor.close_links_except(NOBODY)
    assert (await first).reason == "link"


async def test_a_donor_that_is_not_there_is_a_failed_pull(
    sides: Sides, consumer: Side, donor: Side
) -> None:
    sides.all.remove(donor)
    await xoscar.destroy_actor(donor.actor)
    assert (await consumer.pull(donor, [0]))[:2] == (0, "link")
    await donor.pool.stop()
    assert (await consumer.pull(donor, [0]))[:2] == (0, "link")


class Slow(faults._FaultySharedMemory):
    """A consumer that waits before it copies its rows."""

    waiting = asyncio.Event()
    go_on = threading.Event()

    class link(faults._FaultyLink):  # noqa: N801  # as it is called there
        def receive(
            self, slots: Sequence[int], granted: Sequence[int], check: Check, deadline: float
        ) -> Iterator[int]:
            Slow.loop.call_soon_threadsafe(Slow.waiting.set)
            Slow.go_on.wait()
            return self.link.receive(slots, granted, check, deadline)

    loop: asyncio.AbstractEventLoop


@pytest.mark.parametrize("kind", ["shared_memory"], indirect=True)
async def test_a_row_that_changes_while_it_is_copied_is_noticed(sides: Sides, donor: Side) -> None:
    """The grant has expired, and the donor uses the slot for another chunk."""
    Slow.loop = asyncio.get_running_loop()
    consumer = await sides.start("consumer", Slow)
    pulling = asyncio.ensure_future(consumer.pull(donor, [1, 2, 3]))
    await Slow.waiting.wait()
    donor.rows[2] = donor.rows[7]
    Slow.go_on.set()
    assert await pulling == PullResult(1, "checksum")


class Elsewhere(SharedMemoryTransport):
    """A donor that says it is on our host and is not, as a machine restored from the same snapshot:
    nobody is found at the socket that it names."""

    def accept(self, hello: bytes, secret: bytes, deadline: float) -> Acceptance:  # type: ignore[override]
        acceptance = super().accept(hello, secret, deadline)
        acceptance.answer = b"elsewhere " + acceptance.answer[:6]
        return acceptance


class Silent(SharedMemoryTransport):
    """A donor that takes the connection and hands nothing over."""

    def accept(self, hello: bytes, secret: bytes, deadline: float) -> Acceptance:  # type: ignore[override]
        acceptance = super().accept(hello, secret, deadline)
        acceptance.complete = self._say_nothing  # type: ignore[method-assign]
        return acceptance

    def _say_nothing(self, deadline: float) -> NoReturn:
        threading.Event().wait(deadline - time.monotonic())
        raise LinkError("nothing was said")


AUTO = (SharedMemoryTransport, GlooTransport)


@pytest.mark.parametrize("kind", ["gloo"], indirect=True)
class TestAuto:
    """Shared memory where it works, Gloo where it does not, in the same fetch."""

    async def test_donors_of_this_host_are_linked_by_shared_memory(self, sides: Sides) -> None:
        consumer, donor = [await sides.start(name, *AUTO) for name in ("consumer", "donor")]
        assert await consumer.actor.pull(consumer.order(donor, [1])) == PullResult(
            1, None, "shared_memory"
        )
        stats = await consumer.actor.stats()
        assert (stats["transport"], stats["fallbacks"]) == ("shared_memory", 0)
        assert stats["transports"]["gloo"]["links"] == 0

    @pytest.mark.parametrize("says", [None, "another-boot 1 0"])
    async def test_donors_of_other_hosts_by_gloo(self, sides: Sides, says: str | None) -> None:
        consumer, donor = [await sides.start(name, *AUTO) for name in ("consumer", "donor")]
        order = consumer.order(donor, [1], host=says)
        assert await consumer.actor.pull(order) == PullResult(1, None, "gloo")
        stats = await consumer.actor.stats()
        assert (stats["transport"], stats["fallbacks"]) == ("gloo", 0)

    @pytest.mark.parametrize("near", [Elsewhere, Silent])
    async def test_a_donor_whose_memory_cannot_be_had_by_gloo_at_once_and_from_then_on(
        self, sides: Sides, near: type[Transport]
    ) -> None:
        consumer = await sides.start("consumer", *AUTO)
        donor = await sides.start("donor", near, GlooTransport)
        for slot in range(2):
            order = consumer.order(donor, [slot])
            assert await consumer.actor.pull(order) == PullResult(1, None, "gloo")
            await donor.actor.close_links_except(
                NOBODY
            )  # so that the next fetch makes another link
        stats = await consumer.actor.stats()
        assert (stats["linked_to"], stats["fallbacks"]) == ({"donor": "gloo"}, 1)
        assert np.array_equal(consumer.rows[:2], donor.rows[:2])

    async def test_a_short_fetch_leaves_time_for_the_second_try(self, sides: Sides) -> None:
        consumer = await sides.start("consumer", *AUTO)
        donor = await sides.start("donor", Silent, GlooTransport)
        order = consumer.order(donor, [1], timeout=2.0)
        assert await consumer.actor.pull(order) == PullResult(1, None, "gloo")

    async def test_who_does_not_know_the_secret_gets_neither(self, sides: Sides) -> None:
        consumer = await sides.start("consumer", *AUTO, secret=b"other")
        donor = await sides.start("donor", *AUTO)
        assert await consumer.pull(donor, [1]) == PullResult(0, "link")
        assert (await consumer.actor.stats())["fallbacks"] == 0
        await donor.until_links(0)

    async def test_a_link_is_opened_for_whoever_examines(self, sides: Sides) -> None:
        consumer, donor = [await sides.start(name, *AUTO) for name in ("consumer", "donor")]
        endpoint = Endpoint(donor.pool.external_address, donor.host)
        assert await consumer.actor.probe_link("donor", endpoint, PATIENCE) is None
        assert (await consumer.actor.stats())["linked_to"] == {"donor": "shared_memory"}


@pytest.mark.parametrize("kind", ["gloo"], indirect=True)
@pytest.mark.parametrize(
    ("says", "reason"), [(None, "memory not shared"), ("another-boot 1 0", "other machine")]
)
async def test_who_demands_shared_memory_is_told_why_there_is_none(
    sides: Sides, says: str | None, reason: str
) -> None:
    consumer = await sides.start("consumer", SharedMemoryTransport)
    donor = await sides.start("donor", *AUTO)
    assert await consumer.pull(donor, [1], host=says) == PullResult(0, reason)
    endpoint = Endpoint(donor.pool.external_address, says)
    told = await consumer.actor.probe_link("donor", endpoint, PATIENCE)
    assert told == f"no link by shared_memory: {reason}"
    assert (await consumer.pull(donor, [1])).verified == 1


@pytest.mark.parametrize("kind", ["gloo"], indirect=True)
async def test_a_transport_that_the_donor_has_not_is_refused(sides: Sides) -> None:
    consumer, donor = (
        await sides.start("consumer"),
        await sides.start("donor", SharedMemoryTransport),
    )
    assert await consumer.pull(donor, [1]) == PullResult(0, "link")
    with pytest.raises(LinkError, match="offers shared_memory, not 'gloo'"):
        await donor.actor.open_link(PROTOCOL_VERSION, "id", "us", "gloo", b"", 1.0)


def test_a_transport_is_found_by_its_path() -> None:
    assert (
        load_transport("xinference_xavier.transfer.transports.gloo:GlooTransport") is GlooTransport
    )
    for wrong in ("xinference_xavier.transfer.transports.gloo:GlooLink", "json:dumps"):
        with pytest.raises(TypeError, match="is not a Transport"):
            load_transport(wrong)

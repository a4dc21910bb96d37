"""What any transport does: it moves whole rows from region to region, only for a granted fetch of a
replica of the model; a lost peer costs a fetch, and nothing stays behind."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import xoscar

from tests.faults import ROWS_BEFORE_STALL
from tests.harness.replicas import wait_until
from tests.transfer import sides as actors
from tests.transfer.sides import KEYS, KINDS, NOBODY, SECRET, Kind, Sides
from tests.transfer.transports.links import ROWS, Halves, Link, Side, later, soon, unchecked
from xinference_xavier.errors import LinkError, LinkTimeoutError
from xinference_xavier.protocol.transfer import PullResult
from xinference_xavier.transfer.transports import gloo
from xinference_xavier.transfer.transports.base import Transport

pytestmark = pytest.mark.parametrize("kind", KINDS, indirect=True)


@pytest.fixture
def transport(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> type[Transport]:
    """Over Gloo, few rows are in flight at once."""
    monkeypatch.setattr(gloo, "_IN_FLIGHT_BYTES", 0)
    return kind.plain


class TestLink:
    """One link between two regions."""

    def test_rows_arrive_byte_for_byte_where_they_belong(
        self, link: Link, here: Side, there: Side
    ) -> None:
        """In any order, batch after batch; an empty one too."""
        expected = here.region.array.copy()
        for seed, count in enumerate((40, 1, 0, 64)):
            order = np.random.default_rng(seed).permutation(ROWS)
            sources, targets = order[:count].tolist(), order[::-1][:count].tolist()
            expected[targets] = there.region.array[sources]
            assert [*link.move(targets, sources)] == targets
            assert np.array_equal(here.region.array, expected), "nothing else was touched"

    def test_each_row_is_checked_when_it_is_here(self, link: Link, here: Side, there: Side) -> None:
        seen: dict[int, bytes] = {}

        def check(slot: int) -> None:
            seen[slot] = here.region.row(slot).tobytes()

        assert [*link.move([1, 2], [4, 5], check)] == [1, 2]
        assert seen == {1: there.region.row(4).tobytes(), 2: there.region.row(5).tobytes()}

    def test_rows_before_one_that_is_wrong_count(self, link: Link) -> None:
        def check(slot: int) -> None:
            if slot == 2:
                raise LinkError("damaged")

        rows = link.move([1, 2, 3], [4, 5, 6], check)
        assert next(rows) == 1
        with pytest.raises(LinkError, match="damaged"):
            next(rows)

    def test_a_deadline_in_the_past_ends_the_wait_soon(self, link: Link) -> None:
        with pytest.raises(LinkTimeoutError):
            [*link.receive([0], [0], deadline=time.monotonic() - 10)]

    def test_a_donor_does_not_wait_for_ever_for_its_consumer(self, halves: Halves) -> None:
        with pytest.raises(LinkTimeoutError):
            halves.acceptance.complete(soon())

    def test_a_link_that_is_withdrawn_once_it_is_made_is_closed(
        self, halves: Halves, threads: ThreadPoolExecutor
    ) -> None:
        consumer, _ = (end.result() for end in halves.complete(threads))
        halves.offer.withdraw()
        with pytest.raises(LinkError, match=r"the link (is|was) closed"):
            [*consumer.receive([1], [1], unchecked, later())]

    def test_a_closed_link_takes_nothing(self, link: Link) -> None:
        link.consumer.close()
        with pytest.raises(LinkError, match=r"the link (is|was) closed"):
            [*link.receive([1], [1])]

    def test_nothing_stays_open(
        self, here: Side, there: Side, threads: ThreadPoolExecutor, no_collector: None
    ) -> None:
        """Neither of a link that was used, nor of one that failed. What all links of two processes
        share, the first one opens."""

        def use() -> None:
            link = Link.make(here, there, threads)
            assert [*link.move([0, 1], [1, 0])] == [0, 1]
            with pytest.raises(LinkTimeoutError):
                [*link.receive([0], [0], deadline=time.monotonic())]
            link.close()

        use()
        before = opened()
        for _ in range(3):
            use()
        wait_until(lambda: has_ended(before), "all is closed")


def opened() -> tuple[int, int]:
    return psutil.Process().num_fds(), threading.active_count()


def has_ended(before: tuple[int, int]) -> bool:
    """No more is open than before; threads of earlier tests may end meanwhile."""
    return all(now <= then for now, then in zip(opened(), before, strict=True))


class TestFetch:
    """One replica's transfer actor fetches from another's."""

    @pytest.mark.parametrize("secrets", [(SECRET, b"other"), (None, SECRET), (SECRET, None)])
    async def test_a_wrong_secret_moves_nothing(
        self, sides: Sides, secrets: tuple[bytes | None, bytes | None]
    ) -> None:
        consumer = await sides.start("consumer", secret=secrets[0])
        donor = await sides.start("donor", secret=secrets[1])
        before = consumer.rows.copy()
        assert await consumer.pull(donor, [0, 1]) == PullResult(0, "link")
        assert np.array_equal(consumer.rows, before)
        assert await consumer.links() == 0
        await donor.until_links(0)  # its half link ends later

    async def test_an_expired_grant_ends_the_link(
        self, consumer: actors.Side, donor: actors.Side
    ) -> None:
        """Rows that the consumer had read itself by then are whole, or fail their checksums."""
        await consumer.pull(donor, [0], lifetime=-1)
        await consumer.until_links(0)
        assert (await donor.actor.stats())["bytes_sent"] == 0
        assert await consumer.pull(donor, [1]) == PullResult(1, None), "the next one is unharmed"

    @pytest.mark.parametrize("slot", [-1, actors.ROWS])
    async def test_a_slot_outside_of_the_donors_memory_is_refused(
        self, consumer: actors.Side, donor: actors.Side, slot: int
    ) -> None:
        before = consumer.rows.copy()
        assert (await consumer.pull(donor, [0, 1], granted=[0, slot])).verified == 0
        assert np.array_equal(consumer.rows, before)

    async def test_rows_of_another_size_are_refused(
        self, sides: Sides, consumer: actors.Side
    ) -> None:
        """Over Gloo, a longer message than was asked for would end the receiving process."""
        donor = await sides.start("donor", row_bytes=2 * actors.ROW_BYTES)
        assert await consumer.pull(donor, [0]) == PullResult(0, "link")

    async def test_a_wrong_row_ends_the_run_of_whole_rows_and_the_link(
        self, consumer: actors.Side, donor: actors.Side
    ) -> None:
        """Else a donor would refuse everybody after so many failures of anybody."""
        keys = (*KEYS[:2], KEYS[9], *KEYS[3:5])
        for _ in range(4):
            assert await consumer.pull(donor, range(5), keys=keys) == PullResult(2, "checksum")
            assert await consumer.links() == 0
        assert await donor.links() <= 1

    async def test_a_stalled_donor_costs_the_time_limit_and_not_what_has_arrived(
        self, sides: Sides, kind: Kind
    ) -> None:
        consumer = await sides.start("consumer", kind.stallable)
        donor = await sides.start("donor", kind.stalling)
        result = await consumer.pull(donor, range(8), timeout=2.0)
        assert result == PullResult(ROWS_BEFORE_STALL, "timeout")
        assert await consumer.links() == 0

    async def test_a_donor_that_gives_up_its_link_ends_the_fetch(
        self, sides: Sides, kind: Kind
    ) -> None:
        consumer = await sides.start("consumer", kind.stallable)
        donor = await sides.start("donor", kind.stalling)
        pulling = asyncio.ensure_future(consumer.pull(donor, range(8)))
        await consumer.until_links(1)
        await donor.actor.close_links_except(NOBODY)
        assert (await pulling).reason == "link"

    async def test_a_link_that_died_while_idle_costs_nothing(
        self, consumer: actors.Side, donor: actors.Side
    ) -> None:
        """Our lease ended while we were cut off: the donor closed it, and nobody told us."""
        await consumer.pull(donor, [0])
        await donor.actor.close_links_except(NOBODY)
        assert await consumer.pull(donor, [1]) == PullResult(1, None)

    async def test_a_donor_that_is_not_there_is_a_failed_fetch(
        self, sides: Sides, consumer: actors.Side, donor: actors.Side
    ) -> None:
        sides.all.remove(donor)
        await xoscar.destroy_actor(donor.actor)
        assert await consumer.pull(donor, [0]) == PullResult(0, "link")
        await donor.pool.stop()
        assert await consumer.pull(donor, [0]) == PullResult(0, "link")

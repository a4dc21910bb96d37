"""Links over Gloo: rows never arrive late, and nothing stays of a link that has failed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness.replicas import wait_until
from tests.transfer.transports.links import (
    PATIENCE,
    ROW_BYTES,
    ROWS,
    Halves,
    Link,
    Side,
    later,
    soon,
)
from xinference_xavier.errors import LinkError, LinkTimeoutError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports import gloo
from xinference_xavier.transfer.transports.gloo import GlooTransport

SENTINEL = 0xA5
PROMPTLY = PATIENCE / 2  # long before the deadline


@pytest.fixture
def transport() -> type[GlooTransport]:
    return GlooTransport


def receive(link: Link, slots: Sequence[int], deadline: float | None = None) -> list[int]:
    """Receive into `slots`; the donor chooses which rows it sends."""
    return [*link.receive(slots, slots, deadline=deadline)]


def test_several_rows_are_in_flight(
    link: Link, here: Side, there: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the consumer checks the first row, others arrive, up to a limit."""
    monkeypatch.setattr(link.consumer, "_in_flight", 4)
    slots = list(range(10))
    untouched = here.region.array[4:10].copy()
    rows = link.move(slots, slots)
    assert next(rows) == 0
    wait_until(
        lambda: np.array_equal(here.region.array[:4], there.region.array[:4]), "four rows are here"
    )
    assert np.array_equal(here.region.array[4:10], untouched)
    assert list(rows) == slots[1:]


@pytest.mark.usefixtures("no_collector")
class TestThreads:
    """Gloo has two threads per group. An exception that passed through a link keeps the link until
    the garbage collector runs, which in an idle process may be never. It must not keep the threads.
    """

    def test_a_failed_link_that_is_still_referenced_has_none(
        self, here: Side, there: Side, threads: ThreadPoolExecutor
    ) -> None:
        before = gloo_threads()
        link = Link.make(here, there, threads)
        wait_until(lambda: gloo_threads() == before + 4, "the threads have their names")
        with pytest.raises(LinkError) as failure:
            receive(link, [1, 2, 3], soon())
        link.close()
        wait_until(lambda: gloo_threads() == before, "its threads have ended")
        assert failure.value.__traceback__ is not None

    def test_a_link_that_was_never_completed_has_none(self, here: Side, there: Side) -> None:
        before = gloo_threads()
        halves = Halves.make(here, there)
        halves.offer.set_peer_part(halves.acceptance.answer)
        wait_until(lambda: gloo_threads() == before + 4, "Gloo has connected both")
        halves.withdraw()
        wait_until(lambda: gloo_threads() == before, "its threads have ended")

    def test_a_link_whose_other_side_gave_up_has_none(self, here: Side, there: Side) -> None:
        before = gloo_threads()
        offer, acceptance = Halves.make(here, there)
        with pytest.raises(LinkError) as failure:
            acceptance.complete(soon())
        acceptance.withdraw()
        offer.set_peer_part(acceptance.answer)
        offer.withdraw()
        wait_until(lambda: gloo_threads() == before, "its threads have ended")
        assert failure.value.__traceback__ is not None


def gloo_threads() -> int:
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has just ended
            count += name.read_text().strip() == "pt_gloo_runloop"
    return count


def test_nothing_arrives_after_the_consumer_has_closed(
    link: Link, here: Side, threads: ThreadPoolExecutor
) -> None:
    """The slots may have been reused by then."""
    slots = list(range(8))
    receiving = threads.submit(receive, link, slots)
    link.donor.send(slots[:3], later())
    link.consumer.close()
    with pytest.raises(LinkError):
        receiving.result(PROMPTLY)
    here.region.array[:] = SENTINEL
    with pytest.raises(LinkError):
        link.donor.send(slots[3:], later())
    assert (here.region.array == SENTINEL).all()


def test_a_missing_row_ends_the_link_at_the_deadline(link: Link, here: Side) -> None:
    with pytest.raises(LinkTimeoutError):
        receive(link, [0, 1], soon())
    here.region.array[:] = SENTINEL
    with pytest.raises(LinkError):
        link.donor.send([0, 1], soon())
    with pytest.raises(LinkError):
        receive(link, [2])
    assert (here.region.array == SENTINEL).all()


def test_closing_ends_blocked_calls_and_is_idempotent(
    link: Link, threads: ThreadPoolExecutor
) -> None:
    sending = threads.submit(link.donor.send, list(range(ROWS)), later())
    closing = [threads.submit(link.donor.close) for _ in range(4)]
    for each in closing:
        each.result()
    with pytest.raises(LinkError):
        sending.result()
    link.donor.close()


def test_half_links_that_come_to_nothing_leave_few_sockets(
    here: Side, there: Side, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which side connects depends on their ports, so both sides are donors in turn. A connection
    for a consumer that gave up stays in its device."""
    most = 2
    monkeypatch.setattr(gloo, "MAX_WITHDRAWN", most)

    def come_to_nothing(consumer: Side, donor: Side) -> None:
        offer = consumer.transport.offer(soon())
        acceptance = donor.transport.accept(offer.hello, soon())
        assert acceptance.answer
        offer.withdraw()
        with pytest.raises(LinkError):
            acceptance.complete(soon())
        acceptance.withdraw()

    before = sockets()
    for consumer, donor in ((here, there), (there, here)):
        for _ in range(3 * most):
            come_to_nothing(consumer, donor)
    wait_until(lambda: sockets() <= before + 2 * most, "the old devices have closed")
    link = Link.make(here, there, threads)
    assert [*link.move([0], [0])] == [0]
    link.close()


def sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))


def listening_ports() -> set[int]:
    sockets = psutil.Process().net_connections("tcp")
    return {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}


@pytest.mark.process
def test_all_links_share_one_listening_port(
    here: Side, there: Side, threads: ThreadPoolExecutor
) -> None:
    before = listening_ports()
    link = Link.make(here, there, threads)
    assert listening_ports() == before
    link.close()


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(TransportError, match=r"Gloo cannot listen on host '192.0.2.1'"):
        GlooTransport(Region.create(ROWS, ROW_BYTES), "192.0.2.1", None)

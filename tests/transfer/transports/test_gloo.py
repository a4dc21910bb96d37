"""Links over Gloo: rows move from region to region, and never late."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from tests.harness.replicas import wait_until
from xinference_xavier.errors import LinkError, LinkTimeoutError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports import gloo
from xinference_xavier.transfer.transports.base import seal
from xinference_xavier.transfer.transports.gloo import GlooLink, GlooTransport

HOST = "127.0.0.1"
ROWS, ROW_BYTES = 64, 64 << 10
SECRET = b"s" * 32
SENTINEL = 0xA5
SOON = 0.2  # seconds: a deadline that passes
PATIENCE = 60.0  # a deadline that does not pass
PROMPTLY = PATIENCE / 2  # long before the deadline


class Link(NamedTuple):
    """Both ends of a link."""

    consumer: GlooLink
    donor: GlooLink


@pytest.fixture
def here() -> Iterator[GlooTransport]:
    yield from transport(seed=1)


@pytest.fixture
def there() -> Iterator[GlooTransport]:
    yield from transport(seed=2)


def transport(seed: int) -> Iterator[GlooTransport]:
    region = Region.create(ROWS, ROW_BYTES)
    region.array[:] = np.random.default_rng(seed).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
    yield GlooTransport(region, HOST, None)
    region.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def link(here: GlooTransport, there: GlooTransport, threads: ThreadPoolExecutor) -> Iterator[Link]:
    """A link from `there` to `here`."""
    link = connect(here, there, threads)
    yield link
    link.consumer.close()
    link.donor.close()


def connect(consumer: GlooTransport, donor: GlooTransport, threads: ThreadPoolExecutor) -> Link:
    offer = consumer.offer(SECRET, later())
    acceptance = donor.accept(offer.hello, SECRET, later())
    consumers = threads.submit(offer.complete, acceptance.answer, later())
    donors = threads.submit(acceptance.complete, later())
    return Link(consumers.result(), donors.result())


def later() -> float:
    return time.monotonic() + PATIENCE


def soon() -> float:
    return time.monotonic() + SOON


def receive(link: Link, slots: Sequence[int], deadline: float | None = None) -> list[int]:
    return list(arriving(link, slots, deadline))


def arriving(link: Link, slots: Sequence[int], deadline: float | None = None) -> Iterator[int]:
    """Receive into `slots`; the donor chooses which rows it sends."""
    return link.consumer.receive(slots, slots, unchecked, deadline or later())


def unchecked(slot: int) -> None:
    """Accept any row."""


def test_rows_arrive_byte_for_byte_where_they_belong(
    link: Link,
    here: GlooTransport,
    there: GlooTransport,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More rows than can be in flight at once, in any order, batch after batch."""
    monkeypatch.setattr(link.consumer, "_in_flight", 4)
    monkeypatch.setattr(link.donor, "_in_flight", 3)
    expected = here.region.array.copy()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(ROWS)
        sources, targets = order[:40].tolist(), order[::-1][:40].tolist()
        expected[targets] = there.region.array[sources]
        sending = threads.submit(link.donor.send, sources, later())
        assert receive(link, targets) == targets
        sending.result()
        assert np.array_equal(here.region.array, expected), "nothing else was touched"


def test_several_rows_are_in_flight(
    link: Link,
    here: GlooTransport,
    there: GlooTransport,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the consumer checks the first row, others arrive, up to a limit."""
    monkeypatch.setattr(link.consumer, "_in_flight", 4)
    slots = list(range(10))
    untouched = here.region.array[4:10].copy()
    sending = threads.submit(link.donor.send, slots, later())
    rows = arriving(link, slots)
    assert next(rows) == 0
    wait_until(
        lambda: np.array_equal(here.region.array[:4], there.region.array[:4]), "four rows are here"
    )
    assert np.array_equal(here.region.array[4:10], untouched)
    assert list(rows) == slots[1:]
    sending.result()


class TestThreads:
    """Gloo has two threads per group. An exception that passed through a link keeps the link until
    the garbage collector runs, which in an idle process may be never. It must not keep the threads.
    """

    @pytest.fixture(autouse=True)
    def no_collector(self) -> Iterator[None]:
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    def test_a_failed_link_that_is_still_referenced_has_none(
        self, here: GlooTransport, there: GlooTransport, threads: ThreadPoolExecutor
    ) -> None:
        before = gloo_threads()
        link = connect(here, there, threads)
        wait_until(lambda: gloo_threads() == before + 4, "the threads have their names")
        with pytest.raises(LinkError) as failure:
            receive(link, [1, 2, 3], soon())
        link.consumer.close()
        link.donor.close()
        wait_until(lambda: gloo_threads() == before, "its threads have ended")
        assert failure.value.__traceback__ is not None

    def test_a_link_that_was_never_completed_has_none(
        self, here: GlooTransport, there: GlooTransport
    ) -> None:
        before = gloo_threads()
        offer = here.offer(SECRET, later())
        acceptance = there.accept(offer.hello, SECRET, later())
        offer.set_peer_part(acceptance.answer)
        wait_until(lambda: gloo_threads() == before + 4, "Gloo has connected both")
        offer.withdraw()
        acceptance.withdraw()
        wait_until(lambda: gloo_threads() == before, "its threads have ended")

    def test_a_link_whose_other_side_gave_up_has_none(
        self, here: GlooTransport, there: GlooTransport
    ) -> None:
        before = gloo_threads()
        offer = here.offer(SECRET, later())
        acceptance = there.accept(offer.hello, SECRET, later())
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


def test_a_stranger_does_not_reach_gloo(here: GlooTransport, there: GlooTransport) -> None:
    """Gloo does not survive every rendezvous."""
    threads_before = threading.active_count()
    offer = here.offer(SECRET, soon())
    with pytest.raises(LinkError, match="does not know this model's secret"):
        there.accept(offer.hello, b"wrong", soon())
    own = there.offer(b"wrong", soon()).hello
    with pytest.raises(LinkError, match="does not know this model's secret"):
        offer.complete(own, soon())
    with pytest.raises(LinkError, match="does not know this model's secret"):
        here.accept(here.offer(SECRET, soon()).hello[:-1], SECRET, soon())
    wait_until(lambda: threading.active_count() <= threads_before, "all threads have ended")


def test_a_hello_is_not_accepted_as_an_answer(here: GlooTransport, there: GlooTransport) -> None:
    offer = here.offer(SECRET, soon())
    with pytest.raises(LinkError, match="does not know this model's secret"):
        offer.complete(offer.hello, soon())


@pytest.mark.parametrize("stranger", ["consumer", "donor"])
def test_a_stranger_that_connects_gets_no_link(
    here: GlooTransport, there: GlooTransport, threads: ThreadPoolExecutor, stranger: str
) -> None:
    """Without a link no row moves: the side that knows the secret refuses, so neither has one."""
    before = here.region.array.copy()
    offer = here.offer(SECRET, later())
    acceptance = there.accept(offer.hello, SECRET, later())
    answer = acceptance.answer
    (offer if stranger == "consumer" else acceptance)._secret = b"wrong"
    offer.set_peer_part = lambda sealed: offer._store.set_peer_part(sealed[32:])  # type: ignore[method-assign]
    for end in (
        threads.submit(offer.complete, answer, later()),
        threads.submit(acceptance.complete, later()),
    ):
        with pytest.raises(LinkError, match="does not know this model's secret"):
            end.result()
    offer.withdraw()
    acceptance.withdraw()
    assert np.array_equal(here.region.array, before)


def test_a_recorded_proof_is_worthless_on_another_link(
    here: GlooTransport, there: GlooTransport, threads: ThreadPoolExecutor
) -> None:
    """Proofs cover both parts of the rendezvous, which are new for each link."""
    transcripts = set()
    for _ in range(2):
        offer = here.offer(SECRET, later())
        acceptance = there.accept(offer.hello, SECRET, later())
        ends = (
            threads.submit(offer.complete, acceptance.answer, later()),
            threads.submit(acceptance.complete, later()),
        )
        for end in ends:
            end.result().close()
        assert offer._store.transcript() == acceptance._store.transcript()
        transcripts.add(offer._store.transcript())
    assert len(transcripts) == 2


def test_nothing_arrives_after_the_consumer_has_closed(
    link: Link, here: GlooTransport, threads: ThreadPoolExecutor
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


def test_a_donor_that_closes_ends_the_consumers_wait(
    link: Link, here: GlooTransport, there: GlooTransport, threads: ThreadPoolExecutor
) -> None:
    receiving = threads.submit(receive, link, range(8))
    link.donor.send([10, 11], later())
    link.donor.close()
    with pytest.raises(LinkError):
        receiving.result(PROMPTLY)
    assert np.array_equal(here.region.array[:2], there.region.array[10:12])


def test_a_missing_row_ends_the_link_at_the_deadline(link: Link, here: GlooTransport) -> None:
    with pytest.raises(LinkTimeoutError):
        receive(link, [0, 1], soon())
    here.region.array[:] = SENTINEL
    with pytest.raises(LinkError):
        link.donor.send([0, 1], soon())
    with pytest.raises(LinkError):
        receive(link, [2])
    assert (here.region.array == SENTINEL).all()


def test_a_row_that_nobody_takes_ends_the_link_at_the_deadline(link: Link) -> None:
    with pytest.raises(LinkTimeoutError):
        link.donor.send([0, 1], soon())


def test_a_deadline_in_the_past_ends_the_wait_soon(link: Link) -> None:
    with pytest.raises(LinkError):
        receive(link, [0], time.monotonic() - 10)


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


def test_links_in_both_directions_at_the_same_time(
    here: GlooTransport, there: GlooTransport, threads: ThreadPoolExecutor
) -> None:
    """Two replicas that fetch from each other must not wait for each other."""
    half = ROWS // 2
    ours, theirs = here.region.array[:half].copy(), there.region.array[:half].copy()
    barrier = threading.Barrier(4)

    def both_ends(consumer: GlooTransport, donor: GlooTransport) -> None:
        link = connect(consumer, donor, threads)

        def send() -> None:
            barrier.wait()
            link.donor.send(range(half), later())

        sending = threads.submit(send)
        barrier.wait()
        receive(link, range(half, ROWS))
        sending.result()

    for end in [threads.submit(both_ends, here, there), threads.submit(both_ends, there, here)]:
        end.result()
    assert np.array_equal(here.region.array[half:], theirs)
    assert np.array_equal(there.region.array[half:], ours)


@pytest.mark.parametrize(
    "part",
    [b"", b"[]", b"{", b'{"a": 1}', b'{"a": "xyz"}', b"{}" * 40_000, b"[" * 60_000],
    ids=["empty", "list", "half", "number", "no hex", "long", "deep"],
)
def test_a_malformed_rendezvous_is_refused_before_anything_starts(
    there: GlooTransport, part: bytes
) -> None:
    """Even a peer that knows the secret may send one, if it runs another version."""
    threads_before = threading.active_count()
    with pytest.raises(LinkError, match="rendezvous"):
        there.accept(seal(SECRET, "rendezvous 0", part), SECRET, later())
    assert threading.active_count() == threads_before
    with pytest.raises(LinkError, match=r"rendezvous|does not know this model's secret"):
        there.accept(part, SECRET, later())


def test_the_donor_waits_for_the_consumer_until_the_deadline(
    here: GlooTransport, there: GlooTransport
) -> None:
    offer = here.offer(SECRET, soon())
    acceptance = there.accept(offer.hello, SECRET, soon())
    offer.withdraw()
    assert acceptance.answer
    with pytest.raises(LinkError):  # it may already be waiting for the proof
        acceptance.complete(soon())


def test_a_withdrawn_offer_leaves_no_thread(here: GlooTransport) -> None:
    threads_before = threading.active_count()
    offer = here.offer(SECRET, later())
    assert offer.hello
    offer.withdraw()
    wait_until(lambda: threading.active_count() == threads_before, "its thread ends")


def test_half_links_that_come_to_nothing_leave_few_sockets(
    here: GlooTransport,
    there: GlooTransport,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which side connects depends on their ports, so both sides are donors in turn. A connection
    for a consumer that gave up stays in its device."""
    most = 2
    monkeypatch.setattr(gloo, "MAX_WITHDRAWN", most)

    def come_to_nothing(consumer: GlooTransport, donor: GlooTransport) -> None:
        offer = consumer.offer(SECRET, soon())
        acceptance = donor.accept(offer.hello, SECRET, soon())
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
    link = connect(here, there, threads)
    sending = threads.submit(link.donor.send, [0], later())
    assert receive(link, [0]) == [0]
    sending.result()
    link.consumer.close()
    link.donor.close()


def sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))


def listening_ports() -> set[int]:
    sockets = psutil.Process().net_connections("tcp")
    return {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}


@pytest.mark.process
def test_its_port_is_in_the_configured_range(threads: ThreadPoolExecutor) -> None:
    region = Region.create(ROWS, ROW_BYTES)
    before = listening_ports()
    confined = GlooTransport(region, HOST, (41000, 41019))
    (port,) = listening_ports() - before
    assert 41000 <= port <= 41019
    other = GlooTransport(region, HOST, None)
    link = connect(confined, other, threads)
    assert len(listening_ports() - before) == 2, "links open no further port"
    link.consumer.close()
    link.donor.close()


@pytest.mark.process
@pytest.mark.parametrize(
    ("host", "ports", "error"),
    [
        (HOST, (1024, 1100), "outside the kernel's ephemeral ports"),
        ("192.0.2.1", None, "Gloo cannot listen on host '192.0.2.1'"),
        ("192.0.2.1", (41000, 41019), "on host '192.0.2.1'"),
    ],
)
def test_hosts_and_ports_that_gloo_cannot_use_are_refused(
    host: str, ports: tuple[int, int] | None, error: str
) -> None:
    region = Region.create(ROWS, ROW_BYTES)
    with pytest.raises(TransportError, match=error):
        GlooTransport(region, host, ports)

"""Links over shared memory: the consumer copies what it was granted, and nothing else happens."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from xinference_xavier.errors import LinkError, LinkTimeoutError
from xinference_xavier.pool.copy_threads import COPY_THREADS
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports import shared_memory
from xinference_xavier.transfer.transports.shared_memory import (
    ConsumerLink,
    DonorLink,
    SharedMemoryTransport,
)

ROWS, ROW_BYTES = 64, 64 << 10
SECRET = b"s" * 32
PATIENCE = 60.0  # a deadline that does not pass
SOON = 0.2  # one that does


class Replica(NamedTuple):
    region: Region
    transport: SharedMemoryTransport


class Pair(NamedTuple):
    consumer: ConsumerLink
    donor: DonorLink


def replica(seed: int, rows: int = ROWS, row_bytes: int = ROW_BYTES) -> Replica:
    region = Region.create(rows, row_bytes)
    region.array[:] = np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)
    return Replica(region, SharedMemoryTransport(region, "127.0.0.1", None))


@pytest.fixture
def here() -> Replica:
    return replica(seed=1)


@pytest.fixture
def there() -> Replica:
    return replica(seed=2)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def pair(here: Replica, there: Replica, threads: ThreadPoolExecutor) -> Iterator[Pair]:
    """From `there` to `here`."""
    pair = connect(here, there, threads)
    yield pair
    pair.consumer.close()
    pair.donor.close()


def connect(
    consumer: Replica, donor: Replica, threads: ThreadPoolExecutor, secret: bytes = SECRET
) -> Pair:
    offer = consumer.transport.offer(secret, later())
    acceptance = donor.transport.accept(offer.hello, SECRET, later())
    donors = threads.submit(acceptance.complete, later())
    try:
        return Pair(offer.complete(acceptance.answer, later()), donors.result())
    finally:
        if donors.exception() is not None:
            offer.withdraw()
            acceptance.withdraw()


def later() -> float:
    return time.monotonic() + PATIENCE


def soon() -> float:
    return time.monotonic() + SOON


def receive(pair: Pair, slots: Sequence[int], granted: Sequence[int]) -> list[int]:
    return list(pair.consumer.receive(slots, granted, unchecked, later()))


def unchecked(slot: int) -> None:
    """Whatever it is."""


def test_rows_arrive_byte_for_byte_where_they_belong(
    pair: Pair, here: Replica, there: Replica
) -> None:
    """In any order, batch after batch; an empty one too."""
    expected = here.region.array.copy()
    for seed, count in enumerate((40, 1, 0, 64)):
        order = np.random.default_rng(seed).permutation(ROWS)
        sources, targets = order[:count].tolist(), order[::-1][:count].tolist()
        expected[targets] = there.region.array[sources]
        assert receive(pair, targets, sources) == targets
        assert np.array_equal(here.region.array, expected), "nothing else was touched"


def test_the_donors_memory_cannot_be_written_by_its_consumer(pair: Pair) -> None:
    """Not by a mistake, and not on purpose: the descriptor itself only reads."""
    assert pair.consumer._theirs is not None
    assert not pair.consumer._theirs.array.flags.writeable
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.write(pair.consumer._theirs.fd, b"x")


def test_a_stranger_gets_no_memory(
    here: Replica, there: Replica, threads: ThreadPoolExecutor
) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(LinkError, match="does not know this model's secret"):
        connect(here, there, threads, secret=b"t" * 32)
    assert psutil.Process().num_fds() == before


def test_who_does_not_know_the_secret_opens_nothing(here: Replica, there: Replica) -> None:
    """Nobody can have a donor wait for it who only reaches its port."""
    before = psutil.Process().num_fds()
    for hello in (b"n" * 48, here.transport.offer(b"t" * 32, later()).hello):
        with pytest.raises(LinkError, match="does not know this model's secret"):
            there.transport.accept(hello, SECRET, later())
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("noise", [b"", b"x", b"x" * 32, b"x" * 4096])
def test_noise_gets_no_memory(
    here: Replica, there: Replica, threads: ThreadPoolExecutor, noise: bytes
) -> None:
    offer = here.transport.offer(SECRET, later())
    acceptance = there.transport.accept(offer.hello, SECRET, later())
    waiting = threads.submit(acceptance.complete, later())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0xinference-xavier-link-{acceptance.answer.hex()}")
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError):
            waiting.result()
        acceptance.withdraw()
        offer.withdraw()
        _, descriptors, _, _ = socket.recv_fds(stranger, 4096, 8)
    assert descriptors == []


@pytest.mark.parametrize("what", [b"", b"x" * 15, b"x" * 47, b"x" * 49, "x" * 48, None, 7])
def test_a_malformed_hello_or_answer_is_refused(here: Replica, there: Replica, what: Any) -> None:
    with pytest.raises(LinkError, match=r"malformed hello|does not know"):
        there.transport.accept(what, SECRET, later())
    offer = here.transport.offer(SECRET, later())
    with pytest.raises(LinkError, match="malformed answer"):
        offer.complete(what, later())
    offer.withdraw()


def test_rows_of_another_size_are_refused(here: Replica, threads: ThreadPoolExecutor) -> None:
    with pytest.raises(LinkError, match=f"the donor's rows have {2 * ROW_BYTES} bytes"):
        connect(here, replica(seed=3, row_bytes=2 * ROW_BYTES), threads)


def test_each_row_is_checked_when_it_is_here(pair: Pair, here: Replica, there: Replica) -> None:
    seen: dict[int, bytes] = {}

    def check(slot: int) -> None:
        seen[slot] = here.region.row(slot).tobytes()

    assert list(pair.consumer.receive([1, 2], [4, 5], check, later())) == [1, 2]
    assert seen == {1: there.region.row(4).tobytes(), 2: there.region.row(5).tobytes()}


def test_a_row_that_takes_long_holds_up_no_other(pair: Pair) -> None:
    slots = range(8)
    others = threading.Barrier(2)
    checked: list[int] = []

    def check(slot: int) -> None:
        if slot == 0:
            others.wait(PATIENCE)
        checked.append(slot)
        if len(checked) == len(slots) - 1:
            others.wait(PATIENCE)

    assert [*pair.consumer.receive(slots, slots, check, later())] == [*slots]
    assert checked[-1] == 0


def test_only_rows_before_one_that_is_wrong_count(pair: Pair) -> None:
    """Another thread has copied the row behind it."""
    behind = threading.Event()

    def check(slot: int) -> None:
        if slot == 2:
            assert behind.wait(PATIENCE)
            raise LinkError("damaged")
        if slot == 3:
            behind.set()

    rows = pair.consumer.receive([1, 2, 3], [4, 5, 6], check, later())
    assert next(rows) == 1
    with pytest.raises(LinkError, match="damaged"):
        next(rows)


def test_a_row_outside_of_the_donors_memory_is_refused(pair: Pair, here: Replica) -> None:
    before = here.region.array.copy()
    with pytest.raises(LinkError, match=f"row {ROWS} is outside the donor"):
        receive(pair, [0, 1], [0, ROWS])
    assert np.array_equal(here.region.array, before)


def test_nobody_waits_longer_than_the_deadline(here: Replica, there: Replica, pair: Pair) -> None:
    with pytest.raises(LinkTimeoutError):
        list(pair.consumer.receive([1], [1], unchecked, time.monotonic()))
    offer = here.transport.offer(SECRET, later())
    acceptance = there.transport.accept(offer.hello, SECRET, later())
    with pytest.raises(LinkTimeoutError):
        acceptance.complete(soon())
    acceptance.withdraw()
    offer.withdraw()


def test_a_closed_link_takes_nothing(pair: Pair) -> None:
    pair.consumer.close()
    with pytest.raises(LinkError, match="the link was closed"):
        receive(pair, [1], [1])


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Whatever waits for it goes on at the end of the test, at the latest."""
    event = threading.Event()
    yield event
    event.set()


def occupy(executor: ThreadPoolExecutor, count: int, go_on: threading.Event) -> list[Future[bool]]:
    """Have all of its `count` threads wait."""
    return [executor.submit(go_on.wait, PATIENCE) for _ in range(count)]


def queued(executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """One is released for each thing that waits for a thread from now on."""
    count, submit = threading.Semaphore(0), executor.submit

    def submitting(*call: Any) -> Future[Any]:
        try:
            return submit(*call)
        finally:
            count.release()

    monkeypatch.setattr(executor, "submit", submitting)
    return count


def begin(
    work: Callable[[], list[int]], threads: ThreadPoolExecutor, queued: threading.Semaphore
) -> Future[list[int]]:
    """Returns once its rows wait for the copy threads."""
    taking = threads.submit(work)
    for _ in range(COPY_THREADS):
        assert queued.acquire(timeout=PATIENCE)
    return taking


def test_rows_that_nobody_copies_yet_are_given_up_by_a_close(
    pair: Pair,
    here: Replica,
    threads: ThreadPoolExecutor,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait for the copies of other links."""
    before = here.region.array.copy()
    copying = here.transport._threads.copying
    others = occupy(copying, COPY_THREADS, go_on)
    count = queued(copying, monkeypatch)
    taking = begin(lambda: receive(pair, [0, 1, 2], [5, 6, 7]), threads, count)
    pair.consumer.close()
    with pytest.raises(LinkError, match="the link was closed"):
        taking.result()
    assert not any(other.done() for other in others)
    go_on.set()
    copying.shutdown()
    assert np.array_equal(here.region.array, before)


def test_a_close_waits_for_the_rows_that_are_being_copied_and_for_no_other(
    pair: Pair,
    here: Replica,
    threads: ThreadPoolExecutor,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = here.region.array.copy()
    copying = threading.Barrier(COPY_THREADS + 1)

    def check(slot: int) -> None:
        copying.wait(PATIENCE)
        go_on.wait(PATIENCE)

    slots = range(3 * COPY_THREADS)
    taking = threads.submit(lambda: [*pair.consumer.receive(slots, slots, check, later())])
    copying.wait(PATIENCE)
    assert pair.consumer._batch is not None
    changed = pair.consumer._batch._changed
    wait_for = changed.wait_for

    def waiting(predicate: Callable[[], bool]) -> bool:
        assert not predicate(), "rows are being copied"
        go_on.set()
        return wait_for(predicate)

    monkeypatch.setattr(changed, "wait_for", waiting)
    pair.consumer.close()
    assert go_on.is_set(), "it waited"
    with pytest.raises(LinkError, match="the link was closed"):
        taking.result()
    assert not np.array_equal(here.region.array[:COPY_THREADS], before[:COPY_THREADS])
    assert np.array_equal(here.region.array[COPY_THREADS:], before[COPY_THREADS:])


def test_links_copy_in_turns(
    here: Replica,
    there: Replica,
    threads: ThreadPoolExecutor,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much the one has to copy, the other gets on."""
    monkeypatch.setattr(shared_memory, "_TURN_BYTES", ROW_BYTES)
    first, second = connect(here, there, threads), connect(here, replica(seed=3), threads)
    many, few = range(ROWS - 2), [ROWS - 2, ROWS - 1]
    has_few = threading.Event()

    def check(slot: int) -> None:
        if slot in many[-COPY_THREADS:]:
            assert has_few.wait(PATIENCE)

    copying = here.transport._threads.copying
    occupy(copying, COPY_THREADS, go_on)
    count = queued(copying, monkeypatch)
    taking_many = begin(
        lambda: [*first.consumer.receive(many, many, check, later())], threads, count
    )
    taking_few = begin(lambda: receive(second, few, few), threads, count)
    go_on.set()
    assert taking_few.result() == few
    has_few.set()
    assert taking_many.result() == [*many]
    for link in (*first, *second):
        link.close()


def test_links_of_one_process_share_its_threads(
    here: Replica, there: Replica, threads: ThreadPoolExecutor
) -> None:
    before = {*threading.enumerate()}
    pairs = [connect(here, there, threads) for _ in range(5)]
    for pair in pairs:
        assert receive(pair, [1, 2], [1, 2]) == [1, 2]
    new = [thread.name for thread in {*threading.enumerate()} - before]
    assert len([name for name in new if name.startswith("xavier-")]) == COPY_THREADS + 1
    for pair in pairs:
        pair.consumer.close()
    last = connect(here, there, threads)
    assert receive(last, [3], [3]) == [3], "closed links end no thread"
    last.consumer.close()


def test_a_donor_that_dies_leaves_its_rows_readable(
    pair: Pair, here: Replica, there: Replica
) -> None:
    """What was granted is still there: the memory lives as long as somebody maps it."""
    expected = there.region.array[5].copy()
    pair.donor.close()
    there.region.close()
    assert receive(pair, [0, 1], [5, 6]) == [0, 1]
    assert np.array_equal(here.region.array[0], expected)


def mappings(region: Region) -> int:
    """How often this process has mapped it."""
    inode = str(os.fstat(region.fd).st_ino)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:xavier-region" in line and line.split()[4] == inode for line in maps)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """In an idle process it may not come for ever."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_the_memory_of_a_donor_is_let_go_when_its_link_is_closed(
    here: Replica, there: Replica, threads: ThreadPoolExecutor
) -> None:
    """Also if somebody still knows the link and the error that it ended with: all memory of a donor
    that is gone would stay otherwise."""
    pair = connect(here, there, threads)
    assert mappings(there.region) == 2
    with pytest.raises(LinkError) as failure:
        list(pair.consumer.receive([1, 2, 3], [1, 2, 3], unchecked, time.monotonic()))
    pair.consumer.close()
    pair.donor.close()
    assert mappings(there.region) == 1, "its own"
    assert failure.value.__traceback__ is not None


@pytest.mark.usefixtures("no_collector")
def test_memory_that_is_not_mapped_yet_is_let_go_at_once(
    here: Replica, there: Replica, threads: ThreadPoolExecutor, go_on: threading.Event
) -> None:
    """It does not wait for that of another donor, which can take seconds."""
    (other,) = occupy(here.transport._threads.mapping, 1, go_on)
    pair = connect(here, there, threads)
    pair.consumer.close()
    assert mappings(there.region) == 1, "its own"
    assert not other.done()


@pytest.mark.usefixtures("no_collector")
def test_memory_that_is_of_no_use_is_let_go_at_once(
    here: Replica, threads: ThreadPoolExecutor
) -> None:
    donor = replica(seed=3, row_bytes=2 * ROW_BYTES)
    with pytest.raises(LinkError) as failure:
        connect(here, donor, threads)
    assert mappings(donor.region) == 1, "its own"
    assert failure.value.__traceback__ is not None


def test_a_link_leaves_nothing_open(
    here: Replica, there: Replica, threads: ThreadPoolExecutor
) -> None:
    process = psutil.Process()
    gc.collect()  # what other tests left open
    before = process.num_fds()
    for _ in range(3):
        pair = connect(here, there, threads)
        pair.consumer.close()
        pair.donor.close()
        del pair  # and with it the mapping
    assert process.num_fds() == before

"""Links over shared memory: the consumer copies what it was granted, and nothing else happens."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.transfer.transports.links import (
    PATIENCE,
    ROW_BYTES,
    ROWS,
    Halves,
    Link,
    Side,
    soon,
)
from xinference_xavier.errors import LinkError, LinkTimeoutError
from xinference_xavier.pool.region import COPY_THREADS, Region
from xinference_xavier.transfer.transports import shared_memory
from xinference_xavier.transfer.transports.shared_memory import SharedMemoryTransport


@pytest.fixture
def transport() -> type[SharedMemoryTransport]:
    return SharedMemoryTransport


def test_the_donors_memory_cannot_be_written_by_its_consumer(link: Link) -> None:
    """Not by a mistake, and not on purpose: the descriptor itself only reads."""
    assert not link.consumer._theirs.array.flags.writeable
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.write(link.consumer._theirs.fd, b"x")


def test_processes_of_another_user_get_no_memory(
    halves: Halves, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    for end in halves.complete(threads):
        with pytest.raises(LinkError, match="4242"):
            end.result()


def test_a_row_that_takes_long_holds_up_no_other(link: Link) -> None:
    slots = range(8)
    others = threading.Barrier(2)
    checked: list[int] = []

    def check(slot: int) -> None:
        if slot == 0:
            others.wait(PATIENCE)
        checked.append(slot)
        if len(checked) == len(slots) - 1:
            others.wait(PATIENCE)

    assert [*link.receive(slots, slots, check)] == [*slots]
    assert checked[-1] == 0


def test_whole_rows_behind_one_that_is_wrong_do_not_count(link: Link) -> None:
    """Another thread has copied the row behind it."""
    behind = threading.Event()

    def check(slot: int) -> None:
        if slot == 2:
            assert behind.wait(PATIENCE)
            raise LinkError("damaged")
        if slot == 3:
            behind.set()

    rows = link.receive([1, 2, 3], [4, 5, 6], check)
    assert next(rows) == 1
    with pytest.raises(LinkError, match="damaged"):
        next(rows)


def test_a_consumer_does_not_wait_for_ever_for_its_donor(halves: Halves) -> None:
    with pytest.raises(LinkTimeoutError):
        halves.offer.complete(halves.acceptance.answer, soon())


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
    rows: Iterator[int], threads: ThreadPoolExecutor, queued: threading.Semaphore
) -> Future[list[int]]:
    """Returns once the rows wait for the copy threads."""
    taking = threads.submit(list, rows)
    for _ in range(COPY_THREADS):
        assert queued.acquire(timeout=PATIENCE)
    return taking


def test_rows_that_nobody_copies_yet_are_given_up_by_a_close(
    link: Link,
    here: Side,
    threads: ThreadPoolExecutor,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait for the copies of other links."""
    before = here.region.array.copy()
    copying = here.transport._threads.copying
    others = occupy(copying, COPY_THREADS, go_on)
    count = queued(copying, monkeypatch)
    taking = begin(link.receive([0, 1, 2], [5, 6, 7]), threads, count)
    link.consumer.close()
    with pytest.raises(LinkError, match="the link was closed"):
        taking.result()
    assert not any(other.done() for other in others)
    go_on.set()
    copying.shutdown()
    assert np.array_equal(here.region.array, before)


def test_a_close_waits_for_the_rows_that_are_being_copied_and_for_no_other(
    link: Link,
    here: Side,
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
    taking = threads.submit(list, link.receive(slots, slots, check))
    copying.wait(PATIENCE)
    changed = link.consumer._batch._changed
    wait_for = changed.wait_for

    def waiting(predicate: Callable[[], bool]) -> bool:
        assert not predicate(), "rows are being copied"
        go_on.set()
        return wait_for(predicate)

    monkeypatch.setattr(changed, "wait_for", waiting)
    link.consumer.close()
    assert go_on.is_set(), "it waited"
    with pytest.raises(LinkError, match="the link was closed"):
        taking.result()
    assert not np.array_equal(here.region.array[:COPY_THREADS], before[:COPY_THREADS])
    assert np.array_equal(here.region.array[COPY_THREADS:], before[COPY_THREADS:])


def test_links_copy_in_turns(
    here: Side,
    there: Side,
    threads: ThreadPoolExecutor,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much the one has to copy, the other gets on."""
    monkeypatch.setattr(shared_memory, "_TURN_BYTES", ROW_BYTES)
    third = Side.make(SharedMemoryTransport, seed=3)
    first, second = (Link.make(here, donor, threads) for donor in (there, third))
    many, few = range(ROWS - 2), [ROWS - 2, ROWS - 1]
    has_few = threading.Event()

    def check(slot: int) -> None:
        if slot in many[-COPY_THREADS:]:
            assert has_few.wait(PATIENCE)

    copying = here.transport._threads.copying
    occupy(copying, COPY_THREADS, go_on)
    count = queued(copying, monkeypatch)
    taking_many = begin(first.receive(many, many, check), threads, count)
    taking_few = begin(second.receive(few, few), threads, count)
    go_on.set()
    assert taking_few.result() == few
    has_few.set()
    assert taking_many.result() == [*many]
    first.close()
    second.close()


def test_links_of_one_process_share_its_threads(
    here: Side, there: Side, threads: ThreadPoolExecutor
) -> None:
    before = {*threading.enumerate()}
    links = [Link.make(here, there, threads) for _ in range(5)]
    for link in links:
        assert [*link.receive([1, 2], [1, 2])] == [1, 2]
    new = [thread.name for thread in {*threading.enumerate()} - before]
    assert len([name for name in new if name.startswith("xavier-")]) == COPY_THREADS + 1
    for link in links:
        link.consumer.close()
    last = Link.make(here, there, threads)
    assert [*last.receive([3], [3])] == [3], "closed links end no thread"
    last.consumer.close()


def test_a_donor_that_dies_leaves_its_rows_readable(link: Link, here: Side, there: Side) -> None:
    """What was granted is still there: the memory lives as long as somebody maps it."""
    expected = there.region.array[5].copy()
    link.donor.close()
    there.region.close()
    assert [*link.receive([0, 1], [5, 6])] == [0, 1]
    assert np.array_equal(here.region.array[0], expected)


def mappings(region: Region) -> int:
    """How often this process has mapped it."""
    inode = str(os.fstat(region.fd).st_ino)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:xavier-region" in line and line.split()[4] == inode for line in maps)


@pytest.mark.usefixtures("no_collector")
def test_the_memory_of_a_donor_is_let_go_when_its_link_is_closed(
    here: Side, there: Side, threads: ThreadPoolExecutor
) -> None:
    """Also if somebody still knows the link and the error that it ended with: all memory of a donor
    that is gone would stay otherwise."""
    link = Link.make(here, there, threads)
    assert mappings(there.region) == 2
    with pytest.raises(LinkError) as failure:
        [*link.receive([1, 2, 3], [1, 2, 3], deadline=time.monotonic())]
    link.close()
    assert mappings(there.region) == 1, "its own"
    assert failure.value.__traceback__ is not None


@pytest.mark.usefixtures("no_collector")
def test_memory_that_is_not_mapped_yet_is_let_go_at_once(
    here: Side, there: Side, threads: ThreadPoolExecutor, go_on: threading.Event
) -> None:
    """It does not wait for that of another donor, which can take seconds."""
    (other,) = occupy(here.transport._threads.mapping, 1, go_on)
    link = Link.make(here, there, threads)
    link.consumer.close()
    assert mappings(there.region) == 1, "its own"
    assert not other.done()

"""Links of each transport: rows move from region to region, and only with the secret."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from tests.harness.replicas import wait_until
from tests.transfer.transports.links import ROWS, SECRET, Halves, Link, Side, later, soon, unchecked
from xinference_xavier.errors import LinkError, LinkTimeoutError
from xinference_xavier.transfer.transports import gloo
from xinference_xavier.transfer.transports.base import PROOF_BYTES, Transport, prove, verify
from xinference_xavier.transfer.transports.gloo import GlooTransport
from xinference_xavier.transfer.transports.nixl import NixlTransport
from xinference_xavier.transfer.transports.shared_memory import SharedMemoryTransport

ALL = (GlooTransport, NixlTransport, SharedMemoryTransport)


@pytest.fixture(params=ALL, ids=lambda kind: kind.name)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Transport]:
    """Over Gloo, few rows are in flight at once."""
    monkeypatch.setattr(gloo, "_IN_FLIGHT_BYTES", 0)
    kind: type[Transport] = request.param
    return kind


def test_rows_arrive_byte_for_byte_where_they_belong(link: Link, here: Side, there: Side) -> None:
    """In any order, batch after batch; an empty one too."""
    expected = here.region.array.copy()
    for seed, count in enumerate((40, 1, 0, 64)):
        order = np.random.default_rng(seed).permutation(ROWS)
        sources, targets = order[:count].tolist(), order[::-1][:count].tolist()
        expected[targets] = there.region.array[sources]
        assert [*link.move(targets, sources)] == targets
        assert np.array_equal(here.region.array, expected), "nothing else was touched"


def test_each_row_is_checked_when_it_is_here(link: Link, here: Side, there: Side) -> None:
    seen: dict[int, bytes] = {}

    def check(slot: int) -> None:
        seen[slot] = here.region.row(slot).tobytes()

    assert [*link.move([1, 2], [4, 5], check)] == [1, 2]
    assert seen == {1: there.region.row(4).tobytes(), 2: there.region.row(5).tobytes()}


def test_rows_before_one_that_is_wrong_count(link: Link) -> None:
    def check(slot: int) -> None:
        if slot == 2:
            raise LinkError("damaged")

    rows = link.move([1, 2, 3], [4, 5, 6], check)
    assert next(rows) == 1
    with pytest.raises(LinkError, match="damaged"):
        next(rows)


def test_a_deadline_in_the_past_ends_the_wait_soon(link: Link) -> None:
    with pytest.raises(LinkTimeoutError):
        [*link.receive([0], [0], deadline=time.monotonic() - 10)]


@pytest.mark.parametrize("transport", [NixlTransport, SharedMemoryTransport], indirect=True)
def test_a_donor_does_not_wait_for_ever_for_its_consumer(halves: Halves) -> None:
    """Over Gloo, its thread would go on to connect until the other deadline."""
    with pytest.raises(LinkTimeoutError):
        halves.acceptance.complete(soon())


@pytest.mark.parametrize("transport", [GlooTransport, NixlTransport], indirect=True)
def test_a_donor_does_not_wait_for_ever_until_its_rows_are_taken(link: Link) -> None:
    """Over shared memory, it does not wait at all."""
    with pytest.raises(LinkTimeoutError):
        link.donor.send([0, 1], soon())


@pytest.mark.parametrize("transport", [NixlTransport, SharedMemoryTransport], indirect=True)
def test_a_row_outside_of_the_donors_memory_is_refused(link: Link, here: Side) -> None:
    before = here.region.array.copy()
    with pytest.raises(LinkError, match=f"row {ROWS} is outside the donor"):
        [*link.receive([0, 1], [0, ROWS])]
    assert np.array_equal(here.region.array, before)


def test_a_link_that_is_withdrawn_once_it_is_made_is_closed(
    halves: Halves, threads: ThreadPoolExecutor
) -> None:
    consumer, _ = (end.result() for end in halves.complete(threads))
    halves.offer.withdraw()
    with pytest.raises(LinkError, match=r"the link (is|was) closed"):
        [*consumer.receive([1], [1], unchecked, later())]


def test_a_closed_link_takes_nothing(link: Link) -> None:
    link.consumer.close()
    with pytest.raises(LinkError, match=r"the link (is|was) closed"):
        [*link.receive([1], [1])]


def test_a_proof_is_valid_only_for_its_secret_role_and_transcript() -> None:
    proof = prove(SECRET, "donor", b"transcript")
    assert len(proof) == PROOF_BYTES
    verify(SECRET, "donor", b"transcript", proof)
    for secret, role, transcript, given in (
        (b"t" * 32, "donor", b"transcript", proof),
        (SECRET, "consumer", b"transcript", proof),
        (SECRET, "donor", b"another", proof),
        (SECRET, "donor", b"transcript", proof[:-1]),
        (SECRET, "donor", b"transcript", b""),
    ):
        with pytest.raises(LinkError, match="does not know this model's secret"):
            verify(secret, role, transcript, given)


def opened() -> tuple[int, int]:
    return psutil.Process().num_fds(), threading.active_count()


def has_ended(before: tuple[int, int]) -> bool:
    """Whether no more is open than before; threads of earlier tests may end meanwhile."""
    return all(now <= then for now, then in zip(opened(), before, strict=True))


def test_who_does_not_know_the_secret_opens_nothing(here: Side, there: Side) -> None:
    """Nobody can have a donor wait for it who only reaches its port."""
    before = opened()
    strange = here.transport.offer(b"t" * 32, later())
    known = here.transport.offer(SECRET, later())
    wrong = (strange.hello, known.hello[:-1], known.hello + b"x", b"x" + known.hello[1:], b"n" * 48)
    for hello in wrong:
        with pytest.raises(LinkError, match=r"does not know this model's secret|malformed hello"):
            there.transport.accept(hello, SECRET, later())
    strange.withdraw()
    known.withdraw()
    wait_until(lambda: has_ended(before), "all threads have ended")


@pytest.mark.parametrize(
    "what",
    [None, 7, "x" * 48, b"", b"x" * 15, b"x" * 32, b"x" * 100_000],
    ids=lambda what: f"{what!r:.9}",
)
def test_a_malformed_hello_or_answer_is_refused_before_it_is_hashed(
    here: Side, there: Side, what: Any
) -> None:
    offer = here.transport.offer(SECRET, later())
    for give in (there.transport.accept, lambda what, *_: offer.complete(what, later())):
        with pytest.raises(LinkError, match="malformed"):
            give(what, SECRET, later())
    offer.withdraw()

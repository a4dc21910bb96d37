"""Rows are pulled, verified and counted, whatever the donor does."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import xoscar

from tests import faults
from tests.logged import records
from tests.transfer.sides import HOST, KEYS, NOBODY, PATIENCE, ROW_BYTES, ROWS, Kind, Side, Sides
from xinference_xavier.errors import LinkError
from xinference_xavier.protocol.transfer import TRANSFER_UID, PullResult
from xinference_xavier.runtime.net import listen
from xinference_xavier.transfer import links


async def test_what_is_pulled_is_counted(consumer: Side, donor: Side, kind: Kind) -> None:
    assert await consumer.pull(donor, [3, 1, 2]) == PullResult(3, None)
    name = kind.plain.name
    assert await consumer.actor.stats() == {
        "transport": name,
        "bytes_sent": 0,
        "links": 1,
        "linked_to": {"donor": name},
        "obstacles": {"donor": {"best": "no such device"}},
    }
    assert (await consumer.actor.pull(consumer.order(donor, [4]))).transport == name
    await donor.until("bytes_sent", 4 * ROW_BYTES)


async def test_whole_rows_do_not_wait_for_the_donors_word_but_the_links_next_batch_does(
    sides: Sides, consumer: Side, kind: Kind
) -> None:
    """What the donor has not finished yet must not be cancelled: that would close the link."""
    go_on = threading.Event()

    class Held(faults._FaultyLink):
        def send(self, *batch: Any) -> None:
            self.link.send(*batch)
            go_on.wait()

    donor = await sides.start("donor", kind.with_link(Held))
    assert await consumer.pull(donor, [1]) == PullResult(1, None)
    assert await consumer.links() == 1, "nothing went wrong"
    second = asyncio.ensure_future(consumer.pull(donor, [2]))
    assert (await consumer.pull(donor, [3], timeout=0.05))[:2] == (0, "timeout")
    assert not second.done()
    go_on.set()
    assert await second == PullResult(1, None)
    assert await consumer.links() == await donor.links() == 1


async def test_whole_rows_count_whatever_the_donor_says_of_them_afterwards(
    sides: Sides, kind: Kind
) -> None:
    """Such a link carries nothing more."""
    arrived = threading.Event()

    class Telling(faults._FaultyLink):
        def receive(self, *batch: Any) -> Iterator[int]:
            yield from self.link.receive(*batch)
            arrived.set()

    class Late(faults._FaultyLink):
        def send(self, *batch: Any) -> None:
            self.link.send(*batch)
            arrived.wait(PATIENCE)
            raise LinkError("an afterthought")

    consumer = await sides.start("consumer", kind.with_link(Telling))
    donor = await sides.start("donor", kind.with_link(Late))
    for slot in range(2):
        assert await consumer.pull(donor, [slot]) == PullResult(1, None)
        await consumer.until_links(0)
        arrived.clear()


async def test_fetches_at_the_same_time_take_turns_on_a_link(consumer: Side, donor: Side) -> None:
    pulls = (consumer.pull(donor, [n, n + 1]) for n in range(0, ROWS, 2))
    assert set(await asyncio.gather(*pulls)) == {PullResult(2, None)}
    assert np.array_equal(consumer.rows, donor.rows)
    assert await consumer.links() == 1


async def test_pulls_that_go_wrong_are_logged_once_for_each_donor(
    sides: Sides, consumer: Side, donor: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted where they are ordered."""
    other = await sides.start("other")
    caplog.clear()
    for _ in range(3):
        for side in (donor, other):
            assert (await consumer.pull(side, [6], keys=(KEYS[7],))).reason == "checksum"
    logged = [record.getMessage() for record in records(caplog) if record.levelname != "DEBUG"]
    assert [line.split(" failed")[0] for line in logged] == ["pull from donor", "pull from other"]


class _Lying(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A donor's transfer actor that raises what it likes, or answers with what it likes."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._answer = answer

    async def open_link(self, *arguments: object) -> object:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize("answer", [KeyError("x"), ZeroDivisionError(), None, b""], ids=repr)
async def test_whatever_a_donor_answers_the_pull_ends_in_order(
    consumer: Side, donor: Side, answer: object
) -> None:
    """An exception would look to the engine as if its transfer process had died."""
    pool = await listen(HOST, None)
    await xoscar.create_actor(_Lying, answer, address=pool.external_address, uid=TRANSFER_UID)
    endpoint = donor.endpoint._replace(address=pool.external_address)
    order = consumer.order(donor, [0], endpoint=endpoint)._replace(donor="liar")
    assert (await consumer.actor.pull(order))[:2] == (0, "link")
    assert await consumer.links() == 0
    assert (await consumer.pull(donor, [0]))[:2] == (1, None)
    await pool.stop()


async def test_the_link_that_was_not_used_for_longest_makes_room(
    sides: Sides, consumer: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 2)
    first, second, third = [await sides.start(name) for name in ("first", "second", "third")]
    for donor, batches in ((first, 1), (second, 1), (first, 2), (third, 1)):
        assert await consumer.pull(donor, [1]) == PullResult(1, None)
        await donor.until("bytes_sent", batches * ROW_BYTES)  # until then its link is in use
    assert set(await linked_to(consumer)) == {"first", "third"}
    assert await consumer.pull(second, [2]) == PullResult(1, None), "it is not refused for ever"
    assert set(await linked_to(consumer)) == {"second", "third"}


async def linked_to(side: Side) -> dict[str, str]:
    donors: dict[str, str] = (await side.actor.stats())["linked_to"]
    return donors


@pytest.mark.parametrize("full", ["consumer", "donor"])
async def test_a_link_that_carries_a_batch_makes_no_room(
    sides: Sides, kind: Kind, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 1)
    begun, go_on = threading.Event(), threading.Event()

    class Held(faults._FaultyLink):
        def send(self, *batch: Any) -> None:
            begun.set()
            go_on.wait(PATIENCE)
            self.link.send(*batch)

    busy = await sides.start("busy", kind.with_link(Held))
    consumer, other = [await sides.start(name) for name in ("consumer", "other")]
    first = asyncio.ensure_future(consumer.pull(busy, [1]))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    late, donor = (consumer, other) if full == "consumer" else (other, busy)
    assert (await late.pull(donor, [2]))[:2] == (0, "link")
    go_on.set()
    assert await first == PullResult(1, None)
    await busy.until("bytes_sent", ROW_BYTES)
    assert await late.pull(donor, [2]) == PullResult(1, None)
    assert set(await linked_to(late)) == {donor.name}


async def test_links_that_are_made_at_the_same_time_are_bounded_too(
    sides: Sides, consumer: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 2)
    donors = [await sides.start(f"donor {number}") for number in range(4)]
    await asyncio.gather(*(consumer.pull(donor, [1]) for donor in donors))
    assert await consumer.links() <= 2


async def test_rows_that_arrive_before_a_link_breaks_are_not_fetched_and_counted_again(
    sides: Sides, donor: Side, kind: Kind
) -> None:
    """Others would count with them."""

    class Breaking(faults._FaultyLink):
        def receive(self, slots: Sequence[int], *batch: Any) -> Iterator[int]:
            yield from islice(self.link.receive(slots, *batch), 2)
            if len(slots) > 2:
                raise LinkError("broken")

    consumer = await sides.start("consumer", kind.with_link(Breaking))
    assert await consumer.pull(donor, [0]) == PullResult(1, None)
    assert await consumer.pull(donor, range(1, 6)) == PullResult(2, "link")


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

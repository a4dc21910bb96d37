"""The tracker as replicas call it."""

import asyncio
import logging
from typing import Any

import pytest
import xoscar as xo

from tests.harness.replicas import TrackerProcess
from tests.tracker_pools import MODEL, join, let_others_run, look, of, wait_for_update
from tests.tracker_pools import NAMESPACE as NS
from xinference_xavier.protocol.load import Load, RequestReport, Serving
from xinference_xavier.protocol.tracker import (
    Change,
    Left,
    Member,
    NotMemberError,
    Outcome,
    Settings,
    tracker_uid,
)
from xinference_xavier.tracker.actor import BlockTracker

A, B = Member("a", "127.0.0.1:1"), Member("b", "127.0.0.1:1")
K1, K2 = b"key 00000001", b"key 00000002"
LOAD = Load(Serving(128, 1 << 20), prefill_tokens=100, prefill_s=0.1, requests=1, known=("r",))
PROMPT = RequestReport("r", 100, b"k" * 12)


async def test_a_member_sees_what_another_publishes(tracker: Any) -> None:
    await join(tracker, A, B)
    assert await tracker.publish(NS, "a", 1, K1, b"", True) is Outcome.APPLIED
    update = await look(tracker, "b")
    assert (update.snapshot, of(Member, update)) == (True, [A])
    assert of(Change, update) == [Change("a", 1, K1, b"", True)]
    assert await tracker.publish(NS, "a", 2, K2, K1) is Outcome.APPLIED
    update = await tracker.watch(NS, "b", update.epoch, update.revision, 60.0)
    assert of(Change, update) == [Change("a", 2, K2, K1, False)]


async def test_a_watch_is_not_woken_by_its_own_publications(tracker: Any) -> None:
    await join(tracker, A, B)
    watch = await wait_for_update(tracker, "b")
    await tracker.publish(NS, "b", 1, K2, b"")
    await let_others_run()
    assert not watch.done()
    await tracker.publish(NS, "a", 1, K1, b"")
    assert of(Change, await watch) == [Change("a", 1, K1, b"", False)]


async def test_a_watch_returns_empty_handed_when_its_time_is_over(tracker: Any) -> None:
    await join(tracker, A)
    seen = await look(tracker, "a")
    update = await tracker.watch(NS, "a", seen.epoch, seen.revision, 0.01)
    assert (update.revision, update.snapshot, update.news) == (seen.revision, False, ())


async def test_a_watch_sees_others_come_and_go(tracker: Any) -> None:
    await join(tracker, A)
    watch = await wait_for_update(tracker, "a")
    await join(tracker, B)
    assert (await watch).news == (B,)
    watch = await wait_for_update(tracker, "a")
    await tracker.set_serving(NS, "b", False)
    assert (await watch).news == (B._replace(serves=False),)
    watch = await wait_for_update(tracker, "a")
    await tracker.leave(NS, "b")
    assert (await watch).news == (Left("b"),)


async def test_a_namespace_without_members_is_dropped(tracker: Any) -> None:
    first = await join(tracker, A)
    await tracker.leave(NS, "a")
    assert (await tracker.status())["namespaces"] == {}
    assert await tracker.publish(NS, "a", 1, K1, b"") is Outcome.UNKNOWN
    assert (await join(tracker, A)).epoch != first.epoch


async def test_the_join_reply_has_the_secret_and_the_sequence(tracker: Any) -> None:
    reply = await join(tracker, A)
    await tracker.publish(NS, "a", 7, K1, b"", True)
    again = await join(tracker, A)
    assert len(reply.secret) == 32
    assert again.secret == reply.secret
    assert (reply.sequence, again.sequence) == (0, 7)


async def test_pauses_of_the_tracker_extend_the_leases() -> None:
    """Heartbeats that came while its loop stood still could not be received."""
    now = 100.0
    tracker = BlockTracker(MODEL, lease=10.0, tick=1.0, clock=lambda: now)
    await tracker.join(NS, A, Settings())
    for now in (101.0, 102.0, 162.0):
        tracker._expire_leases(now)
    assert await tracker.heartbeat(NS, "a", {})
    for now in (163.0, 164.0, 165.5, 167.0, 168.5, 170.0, 171.5):
        tracker._expire_leases(now)
    assert await tracker.heartbeat(NS, "a", {})
    for step in range(11):
        tracker._expire_leases(now + step)
    assert not await tracker.heartbeat(NS, "a", {})


async def test_an_error_does_not_end_the_expiry(caplog: pytest.LogCaptureFixture) -> None:
    calls, went_on = 0, asyncio.Event()

    def clock() -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("broken clock")
        if calls == 5:
            went_on.set()
        return 0.0

    tracker = BlockTracker(MODEL, tick=0.001, clock=clock)
    with caplog.at_level(logging.ERROR):
        await tracker.__post_create__()
        await asyncio.wait_for(went_on.wait(), 30)
        await tracker.__pre_destroy__()
    assert "broken clock" in caplog.text


async def test_all_of_it_travels_between_processes(stoppable_tracker: TrackerProcess) -> None:
    tracker = await xo.actor_ref(address=stoppable_tracker.address, uid=tracker_uid(MODEL))
    assert (await join(tracker, A, B)).lease == 3600.0
    assert await tracker.publish(NS, "a", 1, K1, b"") is Outcome.APPLIED
    update = await look(tracker, "b")
    assert update.news == (Settings(), A, Change("a", 1, K1, b"", True))
    with pytest.raises(NotMemberError):
        await look(tracker, "c")
    with pytest.raises(ValueError, match="not a multiple of key length"):
        await tracker.publish(NS, "a", 2, K1 + b"x", b"")
    assert await tracker.status()
    assert await tracker.report_load(NS, "a", LOAD, (PROMPT,)) is False
    await tracker.observe("", 0, 0, 0.0)
    assert await tracker.report_load(NS, "a", LOAD, (PROMPT,)) is True
    found = await tracker.observe("", 0, 0, 0.0)
    assert (found.loads[0].load, found.requests) == (LOAD, (PROMPT,))

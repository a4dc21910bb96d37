"""The tracker as its peers call it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest
import xoscar as xo

from tests.tracker_pools import MODEL, create_tracker
from xinference_xavier.protocol.tracker import (
    Change,
    Member,
    NotMemberError,
    Outcome,
    Settings,
    Update,
    tracker_uid,
)
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.tracker import watchers as news_module
from xinference_xavier.tracker.actor import BlockTracker

NS = "namespace"
A, B = Member("a", "127.0.0.1:1"), Member("b", "127.0.0.1:1")
K1, K2 = b"key1", b"key2"


class Replica(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The part of a replica's actor that the tracker calls."""

    def __init__(self, figures: dict[str, Any] | None) -> None:
        super().__init__()
        self._figures = figures

    async def stats(self) -> dict[str, Any]:
        if self._figures is None:
            await asyncio.Event().wait()
        assert self._figures is not None
        return self._figures

    async def set_weights_version(self, version: str) -> bool:
        return True


async def join(tracker: Any, *members: Member, namespace: str = NS) -> Any:
    for member in members:
        reply = await tracker.join(namespace, member, 4, Settings())
    return reply


async def look(tracker: Any, watcher: str, namespace: str = NS) -> Update:
    """What there is now."""
    update: Update = await tracker.watch(namespace, watcher, "", 0, 0.0)
    return update


async def wait_for_news(tracker: Any, watcher: str, namespace: str = NS) -> asyncio.Task[Update]:
    """A watch that waits for something newer than what there is now."""
    seen = await look(tracker, watcher, namespace)
    task = asyncio.create_task(tracker.watch(namespace, watcher, seen.epoch, seen.revision, 60.0))
    await let_others_run()
    assert not task.done()
    return task


async def let_others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_one_publishes_the_other_sees(tracker: Any) -> None:
    await join(tracker, A, B)
    assert await tracker.replace(NS, "a", 1, K1) is Outcome.APPLIED
    update = await look(tracker, "b")
    assert (update.snapshot, set(update.members)) == (True, {A, B})
    assert update.changes == (Change("a", 1, K1, b"", True),)
    assert await tracker.publish(NS, "a", 2, K2, K1) is Outcome.APPLIED
    update = await tracker.watch(NS, "b", update.epoch, update.revision, 60.0)
    assert update.changes == (Change("a", 2, K2, K1, False),)


async def test_a_watch_waits_for_news(tracker: Any) -> None:
    await join(tracker, A, B)
    watch = await wait_for_news(tracker, "b")
    await tracker.publish(NS, "a", 1, K1, b"")
    assert (await watch).changes == (Change("a", 1, K1, b"", False),)


async def test_a_watch_is_not_woken_by_its_own_publications(tracker: Any) -> None:
    await join(tracker, A, B)
    watch = await wait_for_news(tracker, "b")
    await tracker.publish(NS, "b", 1, K2, b"")
    await let_others_run()
    assert not watch.done()
    await tracker.publish(NS, "a", 1, K1, b"")
    assert (await watch).changes == (Change("a", 1, K1, b"", False),)


async def test_who_comes_to_look_while_news_is_pending_waits_for_all_of_it(
    tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joining of the first is told at once, and all that follows later."""
    monkeypatch.setattr(news_module, "SPACING_PER_WATCHER", 3600.0)
    await join(tracker, A, B)
    seen = await look(tracker, "b")
    await tracker.publish(NS, "a", 1, K1, b"")
    watch = asyncio.create_task(tracker.watch(NS, "b", seen.epoch, seen.revision, 60.0))
    await let_others_run()
    assert not watch.done()
    assert (await look(tracker, "b")).changes == (Change("a", 1, K1, b"", True),), "no wait asked"
    await xo.destroy_actor(tracker)
    with pytest.raises(NotMemberError):
        await watch


async def test_a_watch_returns_empty_handed_when_its_time_is_over(tracker: Any) -> None:
    await join(tracker, A)
    seen = await look(tracker, "a")
    update = await tracker.watch(NS, "a", seen.epoch, seen.revision, 0.01)
    assert (update.revision, update.snapshot, update.changes) == (seen.revision, False, ())


async def test_a_watch_sees_others_come_and_go(tracker: Any) -> None:
    await join(tracker, A)
    watch = await wait_for_news(tracker, "a")
    await join(tracker, B)
    assert set((await watch).members) == {A, B}
    watch = await wait_for_news(tracker, "a")
    await tracker.leave(NS, "b")
    assert (await watch).members == (A,)


async def test_namespaces_know_nothing_of_each_other(tracker: Any) -> None:
    await join(tracker, A, namespace="one")
    await join(tracker, B, namespace="two")
    await tracker.publish("one", "a", 1, K1, b"")
    update = await look(tracker, "b", "two")
    assert (update.members, update.changes) == ((B,), ())
    assert await tracker.publish("one", "b", 1, K1, b"") is Outcome.UNKNOWN


async def test_a_namespace_without_members_is_dropped(tracker: Any) -> None:
    first = await join(tracker, A)
    await tracker.leave(NS, "a")
    assert (await tracker.status())["namespaces"] == {}
    assert await tracker.publish(NS, "a", 1, K1, b"") is Outcome.UNKNOWN
    assert (await join(tracker, A)).epoch != first.epoch


async def test_joining_tells_the_secret_and_the_sequence(tracker: Any) -> None:
    reply = await join(tracker, A)
    await tracker.replace(NS, "a", 7, K1)
    again = await join(tracker, A)
    assert len(reply.secret) == 32
    assert again.secret == reply.secret
    assert (reply.sequence, again.sequence) == (0, 7)


async def test_who_does_not_renew_the_lease_is_let_go(pool: Any) -> None:
    tracker = await create_tracker(pool.external_address, lease=0.2, tick=0.02)
    await join(tracker, A)
    with pytest.raises(NotMemberError):
        await tracker.watch(NS, "a", *(await look(tracker, "a"))[1::-1], 60.0)
    assert not await tracker.heartbeat(NS, "a", {})


async def test_who_never_joined_cannot_watch(tracker: Any) -> None:
    with pytest.raises(NotMemberError, match="'a' is no member of namespace 'namespace'"):
        await look(tracker, "a")


async def test_the_tracker_forgives_its_own_pauses() -> None:
    """Heartbeats that came while its loop stood still could not be received."""
    now = 100.0
    tracker = BlockTracker(MODEL, lease=10.0, tick=1.0, clock=lambda: now)
    await tracker.join(NS, A, 4, Settings())
    for now in (101.0, 102.0, 162.0):
        tracker._look(now)
    assert await tracker.heartbeat(NS, "a", {})
    for now in (163.0, 164.0, 165.5, 167.0, 168.5, 170.0, 171.5):
        tracker._look(now)
    assert await tracker.heartbeat(NS, "a", {})
    for step in range(11):
        tracker._look(now + step)
    assert not await tracker.heartbeat(NS, "a", {})


@pytest.mark.parametrize("how", ["publication", "snapshot"])
async def test_one_computes_what_several_want_until_it_is_published(tracker: Any, how: str) -> None:
    await join(tracker, A, B)
    assert await tracker.claim(NS, "a", K1 + K2, 60.0) == 0
    assert await tracker.claim(NS, "b", K1 + K2, 60.0) == 2
    if how == "publication":
        await tracker.publish(NS, "a", 1, K1 + K2, b"")
    else:
        await tracker.replace(NS, "a", 1, K1 + K2)
    assert await tracker.claim(NS, "b", K1 + K2, 60.0) == 0


@pytest.mark.parametrize("end", ["release", "leave"])
async def test_what_one_does_not_compute_after_all_another_does(tracker: Any, end: str) -> None:
    await join(tracker, A, B)
    await tracker.claim(NS, "a", K1, 60.0)
    await (tracker.release(NS, "a", K1) if end == "release" else tracker.leave(NS, "a"))
    assert await tracker.claim(NS, "b", K1, 60.0) == 0


async def test_a_claim_ends_by_itself() -> None:
    now = 100.0
    tracker = BlockTracker(MODEL, clock=lambda: now)
    await join(tracker, A, B)
    await tracker.claim(NS, "a", K1, 5.0)
    now = 105.0
    assert await tracker.claim(NS, "b", K1, 5.0) == 0


async def test_only_members_claim(tracker: Any) -> None:
    await join(tracker, A)
    with pytest.raises(NotMemberError, match="'b' is no member"):
        await tracker.claim(NS, "b", K1, 60.0)
    await tracker.release(NS, "b", K1)
    await tracker.release("elsewhere", "b", K1)


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


async def test_the_switch_reaches_all_namespaces(tracker: Any) -> None:
    await join(tracker, A, namespace="one")
    await join(tracker, B, namespace="two")
    watches = [await wait_for_news(tracker, *who) for who in (("a", "one"), ("b", "two"))]
    off = await tracker.set_enabled(False)
    assert [(await watch).settings for watch in watches] == [off, off]
    assert not (await tracker.status())["enabled"]
    on = await tracker.set_enabled(True)
    assert (on.enabled, on.version > off.version) == (True, True)


async def test_a_new_tracker_learns_the_switch_from_its_replicas(tracker: Any) -> None:
    await join(tracker, A)
    watch = await wait_for_news(tracker, "a")
    await tracker.join(NS, B, 4, Settings(7, False))
    assert (await watch).settings == Settings(7, False)
    await tracker.join("other", A, 4, Settings(6, True))
    assert (await look(tracker, "a", "other")).settings == Settings(7, False)


async def test_switching_a_new_tracker_beats_what_replicas_learned_from_the_old_one(
    pool: Any, tracker: Any
) -> None:
    for _ in range(3):
        old = await tracker.set_enabled(False)
    await xo.destroy_actor(tracker)
    tracker = await create_tracker(pool.external_address)
    new = await tracker.set_enabled(True)
    await tracker.join(NS, A, 4, old)
    assert (await look(tracker, "a")).settings == new


async def test_status_shows_the_figures_of_now(pool: Any, tracker: Any) -> None:
    member = Member("a", pool.external_address)
    await xo.create_actor(
        Replica, {"requests": 2}, address=pool.external_address, uid=replica_uid("a")
    )
    await tracker.join(NS, member, 4, Settings(), "m-0")
    await tracker.heartbeat(NS, "a", {"requests": 1})
    await tracker.publish(NS, "a", 1, K1 + K2, b"")
    status = await tracker.status()
    assert json.loads(json.dumps(status)) == status
    (replica,) = status["namespaces"][NS]["replicas"]
    assert 0 < replica.pop("lease_left_s") <= 10
    assert replica == {
        "replica": "m-0",
        "incarnation": "a",
        "address": member.address,
        "holdings": 2,
        "sequence": 1,
        "stats": {"requests": 2},
    }
    assert (status["model_uid"], status["enabled"]) == (MODEL, True)
    assert (status["namespaces"][NS]["keys"], status["namespaces"][NS]["revision"]) == (2, 2)


async def test_who_listens_to_a_tracker_that_ends_is_told_so(tracker: Any) -> None:
    """There may be another in its place already, with events of its own."""
    listening = asyncio.create_task(tracker.wait_events(0, 3600.0))
    while not (await tracker.status())["watches"]:  # noqa: ASYNC110  # nothing announces it
        await asyncio.sleep(0)
    await xo.destroy_actor(tracker)
    with pytest.raises(xo.ActorNotExist, match="the tracker of model has ended"):
        await listening


@pytest.mark.parametrize("hangs", [False, True])
async def test_status_falls_back_to_the_last_heartbeat(
    pool: Any, tracker: Any, hangs: bool
) -> None:
    """Neither a replica that is gone nor one that hangs keeps the others' figures away."""
    if hangs:
        await xo.create_actor(Replica, None, address=pool.external_address, uid=replica_uid("a"))
    await join(tracker, Member("a", pool.external_address))
    await tracker.heartbeat(NS, "a", {"requests": 1})
    (replica,) = (await tracker.status())["namespaces"][NS]["replicas"]
    assert replica["stats"] == {"requests": 1, "stale": True}


async def test_distinct_keys_count_once(tracker: Any) -> None:
    await join(tracker, A, B)
    await tracker.publish(NS, "a", 1, K1 + K2, b"")
    await tracker.publish(NS, "b", 1, K1, b"")
    assert (await tracker.status())["namespaces"][NS]["keys"] == 2


@pytest.mark.parametrize(
    ("method", "arguments", "complaint"),
    [
        ("join", ("", A, 4, Settings()), "namespace=''"),
        ("join", ("x" * 257, A, 4, Settings()), "namespace='xxx"),
        ("join", (NS, Member("x" * 257, "h:1"), 4, Settings()), "incarnation='xxx"),
        ("join", (NS, Member("a", 5), 4, Settings()), "address=5"),  # type: ignore[arg-type]
        ("join", (NS, A, 0, Settings()), "key_bytes=0"),
        ("join", (NS, A, 4, Settings(-1, True)), "malformed settings: version=-1"),
        ("join", (NS, A, 4, Settings(1, 2)), "enabled=2"),  # type: ignore[arg-type]
        ("join", (NS, A, 5, Settings()), "keys of 5 bytes among keys of 4 bytes"),
        ("publish", (NS, "b", 0, K1, b""), "sequence=0"),
        ("publish", (NS, "b", True, K1, b""), "sequence=True"),
        ("publish", (NS, "b", 1, [K1], b""), "added is list"),
        ("publish", (NS, "b", 1, b"", None), "removed is NoneType"),
        ("publish", (NS, "b", 1, b"", b"123"), "not a multiple of the key length 4"),
        ("replace", (NS, "b", 1, bytearray(4)), "keys is bytearray"),
        ("replace", (NS, "b", 1, b"123"), "not a multiple of the key length 4"),
        ("claim", (NS, "b", [K1], 1.0), "keys is list"),
        ("claim", (NS, "b", b"123", 1.0), "not a multiple of the key length 4"),
        ("claim", (NS, "b", K1, float("nan")), "seconds=nan"),
        ("claim", (NS, "b", K1, 601.0), "seconds=601"),
        ("release", (NS, "b", None), "keys is NoneType"),
        ("release", (NS, "b", b"123"), "not a multiple of the key length 4"),
        ("watch", (NS, "b", "", -1, 1.0), "revision=-1"),
        ("watch", (NS, "b", "", 0, float("nan")), "timeout=nan"),
        ("watch", (NS, "b", "", 0, "1"), "timeout='1'"),
        ("heartbeat", (NS, "b", []), "stats is list"),
        ("heartbeat", (NS, "b", {"x": b""}), "cannot be written as JSON"),
        ("heartbeat", (NS, "b", {"x": "x" * 70_000}), "more than 65536"),
        ("set_enabled", ("false",), "enabled='false'"),
    ],
)
async def test_what_cannot_be_right_is_refused(
    tracker: Any, method: str, arguments: tuple[Any, ...], complaint: str
) -> None:
    await join(tracker, B)
    before = await look(tracker, "b")
    with pytest.raises(ValueError, match=re.escape(complaint)):
        await getattr(tracker, method)(*arguments)
    assert await look(tracker, "b") == before


async def test_all_of_it_travels_between_processes(stoppable_tracker: tuple[Any, str]) -> None:
    tracker = await xo.actor_ref(address=stoppable_tracker[1], uid=tracker_uid(MODEL))
    assert (await join(tracker, A, B)).lease == 10.0
    assert await tracker.publish(NS, "a", 1, K1, b"") is Outcome.APPLIED
    update = await look(tracker, "b")
    assert update.members == (A, B)
    assert update.changes == (Change("a", 1, K1, b"", True),)
    assert update.settings == Settings()
    with pytest.raises(NotMemberError):
        await look(tracker, "c")
    with pytest.raises(ValueError, match="sequence=0"):
        await tracker.publish(NS, "a", 0, K1, b"")
    assert await tracker.status()


async def test_a_replica_between_two_namespaces_is_told_its_weights_too(
    pool: Any, tracker: Any
) -> None:
    """It has left the one and not joined the other yet; one that left for good is not asked."""
    address = pool.external_address
    moving, gone = Member("moving", address), Member("gone", address)
    await xo.create_actor(Replica, {}, address=address, uid=replica_uid("moving"))
    await join(tracker, moving, gone)
    await tracker.leave(NS, "moving", True)
    await tracker.leave(NS, "gone")
    told = await tracker.set_weights_version("2")
    assert told == {"joined": ["moving"], "not_reset": [], "unreachable": []}
    await join(tracker, moving, namespace="other")
    assert (await tracker.set_weights_version("2"))["joined"] == ["moving"], "asked once"


async def test_a_long_answer_needs_no_thread_of_the_process_that_it_is_in(
    stoppable_tracker: tuple[Any, str],
) -> None:
    """They are all taken there; xoscar serializes what has more than a hundred parts on one."""
    tracker = await xo.actor_ref(address=stoppable_tracker[1], uid=tracker_uid(MODEL))
    await join(tracker, *(Member(f"replica-{number}", "127.0.0.1:1") for number in range(60)))
    status = await asyncio.wait_for(tracker.status(), 60.0)
    assert len(status["namespaces"][NS]["replicas"]) == 60

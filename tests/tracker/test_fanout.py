"""The tracker as xinference and its operators call it."""

import asyncio
import json
from typing import Any

import pytest
import xoscar as xo

from tests.harness.replicas import TrackerProcess
from tests.tracker_pools import (
    MODEL,
    NAMESPACE,
    create_tracker,
    join,
    look,
    of,
    wait_for_update,
)
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.protocol.tracker import (
    Member,
    Settings,
    Switches,
    pack_question,
    tracker_uid,
)
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.tracker.actor import BlockTracker

A, B = Member("a", "127.0.0.1:1"), Member("b", "127.0.0.1:1")
K1, K2 = b"key 00000001", b"key 00000002"


class Replica(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The part of a replica's actor that the tracker calls."""

    def __init__(self, stats: dict[str, Any] | None) -> None:
        super().__init__()
        self._stats = stats

    async def stats(self) -> dict[str, Any]:
        if self._stats is None:
            await asyncio.Event().wait()
        return self._stats


CHANGES = pytest.mark.parametrize(
    ("method", "before", "after"), [("set_enabled", False, True), ("set_routing", "off", "auto")]
)
"""Settings that an operator changes: what an earlier tracker had, and what a new one gets."""


@CHANGES
async def test_a_setting_reaches_all_namespaces_and_changes_no_other(
    tracker: Any, method: str, before: Any, after: Any
) -> None:
    await join(tracker, A, namespace="one")
    await join(tracker, B, namespace="two")
    first = await tracker.set_enabled(False)
    second = await tracker.set_routing("backlog")
    watches = [await wait_for_update(tracker, *watcher) for watcher in (("a", "one"), ("b", "two"))]
    changed = await getattr(tracker, method)(after)
    field = method.removeprefix("set_")
    assert changed == second._replace(version=changed.version, **{field: after})
    assert changed.version > second.version > first.version
    assert [(await watch).news for watch in watches] == [(changed,), (changed,)]
    assert (await tracker.status())["enabled"] == changed.enabled


@CHANGES
async def test_a_new_tracker_learns_a_setting_from_its_replicas(
    pool: Any, tracker: Any, method: str, before: Any, after: Any
) -> None:
    await join(tracker, A)
    assert of(Settings, await look(tracker, "a")) == [Settings()], "as the replicas were launched"
    old = await getattr(tracker, method)(before)
    await xo.destroy_actor(tracker)
    tracker = await create_tracker(pool.external_address)
    await join(tracker, A)
    watch = await wait_for_update(tracker, "a")
    await tracker.join(NAMESPACE, B, old)
    assert of(Settings, await watch) == [old]
    await tracker.join("other", A, old._replace(version=old.version - 1, enabled=True))
    assert of(Settings, await look(tracker, "a", "other")) == [old], "the newest counts"


@CHANGES
async def test_a_change_of_a_new_tracker_beats_what_replicas_learned_from_the_old_one(
    pool: Any, tracker: Any, method: str, before: Any, after: Any
) -> None:
    for _ in range(3):
        old = await getattr(tracker, method)(before)
    await xo.destroy_actor(tracker)
    tracker = await create_tracker(pool.external_address)
    new = await getattr(tracker, method)(after)
    await tracker.join(NAMESPACE, A, old)
    assert of(Settings, await look(tracker, "a")) == [new]


class TestAChangeForSomeTime:
    """Whoever made it may be gone before it is over."""

    @pytest.fixture
    def now(self) -> list[float]:
        return [100.0]

    @pytest.fixture
    async def tracker(self, now: list[float]) -> BlockTracker:
        """Its replica was launched with routing by backlog."""
        tracker = BlockTracker(MODEL, clock=lambda: now[0])
        await join(tracker, A)
        serving = Serving(128, 1 << 20, routing="backlog")
        await tracker.report_load(NAMESPACE, "a", Load(serving, 0, 0.0, 0))
        return tracker

    def switches(self, tracker: BlockTracker) -> tuple[Any, ...]:
        tracker._expire_leases(tracker._clock())
        settings = tracker._namespaces.settings
        return settings.enabled, settings.routing, settings.then

    async def test_is_put_back_when_nobody_renews_it(
        self, tracker: BlockTracker, now: list[float]
    ) -> None:
        for _ in range(2):
            await tracker.set_enabled(False, 10.0)
            await tracker.set_routing("off", 10.0)
            now[0] += 9.0
            await tracker.heartbeat(NAMESPACE, "a", {})
            assert self.switches(tracker) == (False, "off", Switches())
        now[0] += 1.0
        assert self.switches(tracker) == (True, None, None)
        _, *told = (record.event for record in await tracker.events())
        assert [(each.get("enabled"), each.get("routing")) for each in told] == [
            (False, None),
            (None, "off"),
            (True, None),
            (None, "backlog"),
        ]

    async def test_can_be_ended(self, tracker: BlockTracker) -> None:
        await tracker.set_enabled(False, 60.0)
        settings = await tracker.set_routing("off", 0)
        assert settings == Settings(settings.version)

    async def test_leaves_a_lasting_one_that_is_made_meanwhile(self, tracker: BlockTracker) -> None:
        await tracker.set_routing("off", 60.0)
        await tracker.set_enabled(False, 60.0)
        await tracker.set_routing("auto")
        assert self.switches(tracker) == (False, "auto", Switches(True, "auto"))
        await tracker.set_enabled(True, 0)
        assert self.switches(tracker) == (True, "auto", None)

    async def test_ends_with_its_tracker(self, tracker: BlockTracker) -> None:
        """The next one would not know until when."""
        settings = await tracker.set_enabled(False, 60.0)
        successor = BlockTracker(MODEL)
        await successor.join(NAMESPACE, A, settings)
        assert self.switches(successor) == (True, None, None)
        assert successor._namespaces.settings.version == settings.version


async def test_a_change_of_a_setting_is_an_event(tracker: Any) -> None:
    await tracker.set_routing("off")
    await tracker.set_enabled(False)
    first, second = (record.event for record in await tracker.events())
    assert (first["event"], first["routing"]) == ("RoutingChanged", "off")
    assert (second["event"], second["enabled"]) == ("SharingSwitched", False)


async def test_status_has_current_stats(pool: Any, tracker: Any) -> None:
    member = Member("a", pool.external_address)
    await xo.create_actor(
        Replica, {"requests": 2}, address=pool.external_address, uid=replica_uid("a")
    )
    await tracker.join(NAMESPACE, member, Settings(), "m-0")
    await tracker.heartbeat(NAMESPACE, "a", {"requests": 1})
    await tracker.publish(NAMESPACE, "a", 1, K1 + K2, b"")
    status = await tracker.status()
    assert json.loads(json.dumps(status)) == status
    (replica,) = status["namespaces"][NAMESPACE]["replicas"]
    assert replica == {
        "replica": "m-0",
        "incarnation": "a",
        "address": member.address,
        "serves": True,
        "verdict": "not compared yet",
        "verdict_reason": "",
        "draining": False,
        "holdings": 2,
        "sequence": 1,
        "stats": {"requests": 2},
    }
    assert (status["model_uid"], status["enabled"]) == (MODEL, True)


@pytest.mark.parametrize("hangs", [False, True])
async def test_status_falls_back_to_the_last_heartbeat(
    pool: Any, tracker: Any, hangs: bool
) -> None:
    """A replica that is gone or hangs does not hold up the others' stats."""
    if hangs:
        await xo.create_actor(Replica, None, address=pool.external_address, uid=replica_uid("a"))
    await join(tracker, Member("a", pool.external_address))
    await tracker.heartbeat(NAMESPACE, "a", {"requests": 1})
    (replica,) = (await tracker.status())["namespaces"][NAMESPACE]["replicas"]
    assert replica["stats"] == {"requests": 1, "stale": True}


async def test_a_long_answer_needs_none_of_the_default_threads(
    stoppable_tracker: TrackerProcess,
) -> None:
    """All of them are occupied. xoscar serializes a message of more than a hundred parts on one."""
    tracker = await xo.actor_ref(address=stoppable_tracker.address, uid=tracker_uid(MODEL))
    await join(tracker, *(Member(f"replica-{number}", "127.0.0.1:1") for number in range(60)))
    status = await asyncio.wait_for(tracker.status(), 60.0)
    assert len(status["namespaces"][NAMESPACE]["replicas"]) == 60


class Explaining(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    async def explain(self, packed: bytes) -> dict[str, Any]:
        tokens = {"prompt_tokens": 8, "context_tokens": 64, "chunk_tokens": 4}
        chunk = {"from": 0, "to": 4, "replicas": {self.uid.decode(): "pool"}}
        return {**tokens, "chunks": [chunk]}


async def test_the_replica_that_was_heard_from_last_explains(tracker: Any) -> None:
    """One that hangs is still a member for a while, and would take the whole deadline."""
    members = [Member(name, tracker.address) for name in ("a", "b", "c")]
    for member in members:
        uid = replica_uid(member.incarnation)
        await xo.create_actor(Explaining, address=tracker.address, uid=uid)
    await join(tracker, *members)
    for latest in ("b", "a", "c"):
        await tracker.heartbeat(NAMESPACE, latest, {})
        answer = await tracker.explain(pack_question({"prompt": "text"}))
        assert answer["chunks"][0]["replicas"] == {replica_uid(latest): "pool"}

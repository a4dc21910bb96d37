"""A replica that drains gets nothing more from routers, and its peers get what only it holds."""

import asyncio
from typing import Any

import pytest
import xoscar as xo

from tests.tracker_pools import MODEL, let_others_run
from tests.tracker_pools import NAMESPACE as NS
from xinference_xavier.protocol.load import Drain, Load, Serving
from xinference_xavier.protocol.tracker import Member, Settings
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.tracker.actor import BlockTracker

LOAD = Load(Serving(128, 1 << 20, drain=20.0), prefill_tokens=0, prefill_s=0.0, requests=1)


class Replica(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The part of a replica's actor that the tracker calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: tuple[set[str], float] | None = None
        self.state = Drain(20.0, 3, True, 5)

    async def drain(self, stay: tuple[str, ...], seconds: float) -> Drain:
        self.asked = {*stay}, seconds
        return self.state

    async def was_asked(self) -> tuple[set[str], float] | None:
        return self.asked


@pytest.fixture
async def replicas(pool: Any, tracker: Any) -> list[Any]:
    """Replicas m-0, m-1 and m-2, with incarnations a, b and c."""
    actors = []
    for number, name in enumerate("abc"):
        member = Member(name, pool.external_address)
        await tracker.join(NS, member, Settings(), f"m-{number}")
        await tracker.report_load(NS, name, LOAD)
        uid = replica_uid(name)
        actors.append(await xo.create_actor(Replica, address=pool.external_address, uid=uid))
    return actors


async def draining(tracker: Any) -> set[str]:
    """What routers are told."""
    found = await tracker.observe("", 0, 0, 0.0)
    return {each.replica for each in found.loads if each.draining}


async def events(tracker: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.event.items() if name not in ("model_uid", "time")}
        for record in await tracker.events()
        if record.event["event"].startswith("ReplicaDrain")
    ]


async def test_routers_learn_at_once_that_a_replica_drains(
    tracker: Any, replicas: list[Any]
) -> None:
    seen = await tracker.observe("", 0, 0, 0.0)
    epoch, revision = seen.update.epoch, seen.update.revision
    news = asyncio.create_task(tracker.observe(epoch, revision, seen.version, 60.0))
    await let_others_run()
    assert await tracker.drain("m-0") == Drain(20.0, 3, True, 5)
    (load,) = (await news).loads
    assert (load.replica, load.draining, load.load) == ("m-0", True, LOAD)
    await tracker.report_load(NS, "a", LOAD)
    assert await draining(tracker) == {"m-0"}, "its reports change nothing"
    await tracker.undrain("m-0")
    assert await draining(tracker) == set()


async def test_a_replica_that_nobody_drains_any_more_gets_requests_again() -> None:
    """The removal may have failed, and its end did not get here. Time in which the tracker stood
    still, and could hear nothing, does not count."""
    now = 100.0
    tracker = BlockTracker(MODEL, lease=10.0, tick=1.0, clock=lambda: now)

    async def passes(seconds: int) -> set[str]:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            await tracker.heartbeat(NS, "a", {})
            tracker._expire_leases(now)
        return await draining(tracker)

    await tracker.join(NS, Member("a", "127.0.0.1:1"), Settings(), "m-0")
    await tracker.report_load(NS, "a", LOAD)
    for _ in range(2):
        await tracker.drain("m-0")
        assert await passes(8) == {"m-0"}
    now += 60.0
    tracker._expire_leases(now)
    assert await draining(tracker) == {"m-0"}
    seen = await tracker.observe("", 0, 0, 0.0)
    assert await passes(2) == set()
    (load,) = (await tracker.observe("", 0, seen.version, 0.0)).loads
    assert (load.replica, load.draining) == ("m-0", False)


async def test_peers_that_stay_get_what_only_it_holds(tracker: Any, replicas: list[Any]) -> None:
    await tracker.drain("m-0")
    await tracker.drain("m-1")
    assert await replicas[0].was_asked() == ({"b", "c"}, 20.0)
    assert await replicas[1].was_asked() == ({"c"}, 20.0)
    await tracker.drain("m-0")
    await tracker.drained("m-0", 1, 7)
    assert await events(tracker) == [
        {"event": "ReplicaDraining", "replica": "m-0", "seconds": 20.0},
        {"event": "ReplicaDraining", "replica": "m-1", "seconds": 20.0},
        {"event": "ReplicaDrained", "replica": "m-0", "requests": 1, "chunks": 7},
    ]


async def test_a_replica_that_does_not_answer_has_nothing_to_wait_for(
    tracker: Any, replicas: list[Any]
) -> None:
    await xo.destroy_actor(replicas[0])
    assert await tracker.drain("m-0") == Drain(20.0)


async def test_the_engines_of_a_replica_drain_together(tracker: Any, pool: Any) -> None:
    for rank, name in enumerate("ab"):
        member = Member(name, pool.external_address)
        await tracker.join(NS, member, Settings(), f"m-0_dp{rank}")
        await tracker.report_load(NS, name, LOAD)
        await xo.create_actor(Replica, address=pool.external_address, uid=replica_uid(name))
    assert await tracker.drain("m-0") == Drain(20.0, 6, True, 10)
    assert await draining(tracker) == {"m-0_dp0", "m-0_dp1"}
    assert [each["event"] for each in await events(tracker)] == ["ReplicaDraining"]


async def test_one_that_is_not_here_or_takes_no_requests_is_not_drained(
    tracker: Any, replicas: list[Any], pool: Any
) -> None:
    await tracker.join(NS, Member("d", pool.external_address), Settings(), "m-3")
    for replica in ("m-3", "m-4"):
        assert await tracker.drain(replica) == Drain()
    assert (await draining(tracker), await events(tracker)) == (set(), [])


async def test_a_replica_that_has_left_is_forgotten(tracker: Any, replicas: list[Any]) -> None:
    await tracker.drain("m-0")
    await tracker.leave(NS, "a")
    assert await tracker.drain("m-0") == Drain()
    status = await tracker.status()
    shown = {each["replica"]: each["draining"] for each in status["namespaces"][NS]["replicas"]}
    assert shown == {"m-1": False, "m-2": False}
    await tracker.drain("m-1")
    status = await tracker.status()
    shown = {each["replica"]: each["draining"] for each in status["namespaces"][NS]["replicas"]}
    assert shown == {"m-1": True, "m-2": False}

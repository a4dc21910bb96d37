"""Routers follow the trackers of their models, whatever happens to these."""

import asyncio
import math
from typing import Any

import xoscar as xo

from tests.tracker_pools import let_others_run
from tests.world.world import MODEL, REPORTS, Answer, Tracker, World, in_world, text
from xinference_xavier.errors import NotFoundError
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.routing.known_replica import LEASE

LONG = text("long", 10_000)


async def broken(*_: object) -> Any:
    raise ConnectionResetError("the connection broke")


async def nothing(*_: object) -> Any:
    raise NotFoundError("it has ended")


def lose(world: World) -> None:
    """The tracker can be asked no longer."""
    tracker: Any = world.tracker
    tracker.observe = broken
    for replica in world.replicas.values():
        replica.report()  # it ends what waits for news


async def waiting(world: World) -> Answer:
    """A request that waits, as the router knows that the only replica is at its limit."""
    replica = world.replicas["m-0"]
    replica.limit = math.inf
    world.ask(LONG, 10_000)
    await asyncio.sleep(0.1)
    waits = world.ask("waits", stream=False)
    await asyncio.sleep(0.1)
    assert world.router.report()["waiting"] == 1
    return waits


@in_world("m-0")
async def test_the_first_request_begins_to_look_for_the_model(world: World) -> None:
    routers = Routers(world._find_tracker)
    assert routers.get(MODEL) is None
    await asyncio.sleep(0.1)
    router = routers.get(MODEL)
    assert router is not None
    assert router.loads().keys() == {"m-0"}
    assert routers.get(MODEL) is router
    await routers.close()


@in_world("m-0")
async def test_a_model_that_does_not_share_is_not_looked_for_at_each_request(world: World) -> None:
    looked = 0

    async def find(model_uid: str) -> Any:
        nonlocal looked
        looked += 1
        await nothing()

    routers = Routers(find)
    for number in (1, 2):
        for _ in range(50):
            assert routers.get("another") is None
            await asyncio.sleep(0.01)
        assert looked == number
        routers._absent.clear()  # as time would, which is not the loop's there


@in_world("m-0")
async def test_a_tracker_that_is_replaced_has_a_router_of_its_own(world: World) -> None:
    """The model may have been terminated and launched again, differently."""
    before = world.router
    lose(world)
    world.replicas["m-0"].silence()
    world.tracker = Tracker(lambda incarnation: incarnation.removesuffix(" now"))
    world.launched = world.launched._replace(routing="off")
    world.add("m-0")
    await asyncio.sleep(5.0)
    assert world.router is not before
    assert (world.router.routing, before.open()) == ("off", None)


@in_world("m-0", "m-1")
async def test_a_replica_that_does_not_join_the_next_tracker_is_lost(world: World) -> None:
    asked = world.ask(LONG, stream=False)
    await asyncio.sleep(0.1)
    (its,) = (each for each in world.replicas.values() if each.asked)
    its.vanish()
    lose(world)
    world.tracker = Tracker(lambda incarnation: incarnation.removesuffix(" now"))
    next(each for each in world.replicas.values() if each is not its).join()
    await world.done()
    assert asked.status == 500
    assert asked.last is not None
    assert LEASE < asked.last < LEASE + 5.0
    its.leave = lambda: None  # type: ignore[method-assign]


@in_world("m-0")
async def test_a_tracker_that_cannot_be_reached_for_a_while_keeps_its_router(world: World) -> None:
    before, find = world.router, world.routers._find
    world.routers._find = broken
    lose(world)
    await asyncio.sleep(1.0)
    del world.tracker.observe  # type: ignore[method-assign]
    world.routers._find = find
    world.add("m-1")
    await asyncio.sleep(REPORTS)
    assert world.router is before
    assert before.loads().keys() == {"m-0", "m-1"}
    assert before.counts.failures > 1


@in_world("m-0", request_limit=1)
async def test_without_news_of_a_tracker_requests_wait_no_longer_than_its_replicas_are_known(
    world: World,
) -> None:
    waits = await waiting(world)
    lose(world)
    await asyncio.sleep(LEASE + 5.0)
    assert (waits.status, waits.replica) == (200, "")
    assert waits.last is not None
    assert waits.last - waits.asked > LEASE - REPORTS


@in_world("m-0", request_limit=1)
async def test_a_model_that_has_ended_is_forgotten(world: World) -> None:
    before, waits = world.router, await waiting(world)
    find, world.routers._find = world.routers._find, nothing
    lose(world)
    await asyncio.sleep(1.0)
    assert (waits.status, waits.replica) == (200, "")
    assert world.routers.get(MODEL) is None
    assert before.open() is None
    del world.tracker.observe  # type: ignore[method-assign]
    world.routers._find = find
    world.routers._absent.clear()
    world.routers.get(MODEL)
    await asyncio.sleep(1.0)
    assert world.router is not before


class Watched(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Its observers wait for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._watches = 0

    async def observe(self, *_: object) -> None:
        self._watches += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._watches -= 1

    async def watches(self) -> int:
        return self._watches


async def test_a_router_that_ends_leaves_no_watch_open(pool: Any) -> None:
    tracker = await xo.create_actor(Watched, address=pool.external_address, uid="watched")

    async def find(model_uid: str) -> Any:
        return tracker

    routers = Routers(find)
    routers.get(MODEL)
    async with asyncio.timeout(30):
        while await tracker.watches() != 1:
            await let_others_run()
    await routers.close()
    assert await tracker.watches() == 0

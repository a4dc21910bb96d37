"""Requests wait while all replicas are at their limit, and nobody is refused without need."""

import asyncio

from tests.world.world import World, in_world, text

LONG = {"answer": 400}


@in_world("m-0", "m-1", request_limit=1)
async def test_requests_wait_in_order_of_arrival(world: World) -> None:
    asked = []
    for number in range(6):
        asked.append(world.ask(f"{number}", **LONG))
        await asyncio.sleep(0.01)
    await world.done()
    assert [each.status for each in asked] == [200] * 6
    ends = [each.last for each in asked if each.last is not None]
    assert ends == sorted(ends)
    assert world.router.counts.waited == 4


@in_world("m-0", "m-1", request_limit=1)
async def test_nobody_overtakes_where_a_replica_works_again_between_two_reports(
    world: World,
) -> None:
    away = world.actors.pop("m-1")
    holder = world.ask("holder", 1000)
    await asyncio.sleep(0.2)
    first = world.ask("first", 100)
    await asyncio.sleep(0.1)
    world.actors["m-1"] = away
    await asyncio.sleep(1.1)  # the replica that was not there yet may be tried again
    second = world.ask("second", 100)
    await world.done()
    assert (holder.replica, first.replica) == ("m-0", "m-1")
    assert first.first is not None
    assert second.first is not None
    assert first.first < second.first


@in_world("m-0", request_limit=1, queue=1)
async def test_beyond_its_bound_the_queue_refuses(world: World) -> None:
    asked = []
    for number in range(3):
        asked.append(world.ask(f"{number}", **LONG))
        await asyncio.sleep(0.01)
    await world.done()
    assert [each.status for each in asked] == [200, 200, 429]
    assert int(asked[2].headers["retry-after"]) >= 1
    assert not asked[2].replica


@in_world("m-0", request_limit=1)
async def test_who_waits_goes_in_turn_once_no_replica_works(world: World) -> None:
    first = world.ask("first", **LONG)
    await asyncio.sleep(0.01)
    second = world.ask("second", stream=False)
    await asyncio.sleep(0.01)
    world.replicas["m-0"].drain()
    await world.done()
    assert first.replica == "m-0"
    assert not second.replica


@in_world("m-0", "m-1", request_limit=2)
async def test_a_request_that_is_refused_while_it_waits_keeps_its_place(world: World) -> None:
    world.replicas["m-0"].limit = 0
    holders = [world.ask(f"holder {number}", **LONG) for number in range(2)]
    await asyncio.sleep(0.1)
    waiting = [world.ask(text(f"{number}", 50)) for number in range(2)]
    await world.done()
    assert {each.replica for each in (*holders, *waiting)} == {"m-1"}

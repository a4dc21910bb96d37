"""A request outlives the loss of one replica, as long as nothing of its answer has arrived."""

import asyncio

import pytest

from tests.world.world import World, in_world, play, text


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_an_unanswered_request_goes_to_another_replica_once(stream: bool) -> None:
    async def scenario(world: World) -> None:
        asked = world.ask(text("long", 10_000), 10, stream=stream)
        await asyncio.sleep(0.3)
        (first,) = (each for each in world.replicas.values() if each.asked)
        first.die()
        await asyncio.sleep(0.3)
        (second,) = (each for each in world.replicas.values() if each.asked and each is not first)
        assert world.router.counts.moved == 1
        second.die()
        await world.done()
        assert asked.status >= 500 or b"error" in asked.body
        (third,) = (each for each in world.replicas.values() if not each.asked)
        assert third.name not in asked.replica

    play(scenario, "m-0", "m-1", "m-2")


@in_world("m-0", "m-1")
async def test_an_answer_that_has_begun_ends_with_its_replica(world: World) -> None:
    asked = world.ask("short", 1000)
    await asyncio.sleep(1.0)
    assert asked.first is not None
    world.replicas[next(name for name, each in world.replicas.items() if each.asked)].die()
    await world.done()
    assert world.router.counts.moved == 0
    assert sum(len(each.asked) for each in world.replicas.values()) == 1


@in_world("m-0", "m-1")
async def test_a_replica_that_hangs_is_left_once_the_tracker_loses_it(world: World) -> None:
    for replica in world.replicas.values():
        replica.hangs = True
    asked = world.ask("hi", stream=False)
    await asyncio.sleep(0.1)
    hanging = next(each for each in world.replicas.values() if each.asked)
    for replica in world.replicas.values():
        replica.hangs = False
    hanging.leave()
    await world.done()
    assert asked.status == 200
    assert asked.replica not in ("", hanging.name)


@in_world("m-0", "m-1")
async def test_a_replica_that_failed_a_request_gets_no_other_for_a_while(world: World) -> None:
    world.replicas["m-0"].fails = ConnectionRefusedError("nobody listens")
    for number in range(6):
        assert (await world.answer(f"{number}")).replica == "m-1"
    assert len(world.replicas["m-0"].asked) <= 1
    world.replicas["m-0"].fails = None
    await asyncio.sleep(31.0)
    for number in range(6):
        world.ask(text(f"later {number}", 1000))
    await world.done()
    assert "m-0" in {each.replica for each in world.answers}


@in_world("m-0", "m-1")
async def test_a_replica_that_xinference_does_not_admit_costs_no_move(world: World) -> None:
    actor = world.actors.pop("m-0")
    for number in range(4):
        assert (await world.answer(f"{number}")).replica == "m-1"
    world.actors["m-0"] = actor
    await asyncio.sleep(3.0)
    for number in range(4):
        world.ask(text(f"later {number}", 1000))
    await world.done()
    assert "m-0" in {each.replica for each in world.answers}


@in_world("m-0", "m-1")
async def test_an_error_of_the_request_is_the_clients(world: World) -> None:
    error = ValueError("the image cannot be read")
    error.pid = 1  # type: ignore[attr-defined]  # xoscar's mark of an actor's own error
    for replica in world.replicas.values():
        replica.fails = error
    asked = await world.answer("hi", stream=False)
    assert asked.status >= 400
    assert sum(len(each.asked) for each in world.replicas.values()) == 1
    assert world.router.counts.moved == 0

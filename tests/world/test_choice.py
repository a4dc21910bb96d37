"""Where a request goes while all replicas work."""

import asyncio
import itertools

import pytest

from tests.world.world import ENGINE, Answer, World, in_world, play, text

SYSTEM = text("system", 4096)


async def held_by(world: World, prompt: str) -> str:
    """The replica that has computed the prompt, a report later."""
    asked = await world.answer(prompt)
    await asyncio.sleep(3.0)
    return asked.replica


@in_world("m-0", "m-1")
async def test_an_idle_holder_gets_what_begins_alike(world: World) -> None:
    holder = await held_by(world, SYSTEM)
    for number in range(4):
        asked = await world.answer(SYSTEM + text(f"q{number}", 100))
        assert (asked.replica, asked.reason) == (holder, "local")
        await asyncio.sleep(1.0)


@pytest.mark.parametrize(("fetch", "reason"), [(500_000, "fetch"), (5_000, "compute")])
def test_a_busy_holder_is_copied_from_unless_computing_is_faster(fetch: int, reason: str) -> None:
    @in_world("m-0", "m-1", engine=ENGINE._replace(fetch=fetch))
    async def plays(world: World) -> None:
        holder = await held_by(world, SYSTEM)
        world.replicas[holder].other(text("other", 100_000))
        await asyncio.sleep(0.1)
        asked = await world.answer(SYSTEM + text("q", 100))
        assert (asked.replica != holder, asked.reason) == (True, reason)

    plays()


@in_world("m-0", "m-1", "m-2", "m-3")
async def test_a_burst_spreads_before_anybody_reports(world: World) -> None:
    for number in range(16):
        world.ask(text(f"new {number}", 2000))
    await world.done()
    assert sorted(len(each.asked) for each in world.replicas.values()) == [4, 4, 4, 4]


@in_world("m-0", "m-1")
async def test_the_second_with_a_new_text_follows_the_first_before_it_is_computed(
    world: World,
) -> None:
    first = world.ask(SYSTEM + text("one", 100))
    await asyncio.sleep(0.1)
    second = world.ask(SYSTEM + text("two", 100))
    await world.done()
    assert second.replica == first.replica


@in_world("m-0", "m-1", "m-2")
async def test_a_session_decides_between_equals(world: World) -> None:
    chat = {"x-session-id": "chat"}
    first = await world.answer("hi", headers=chat)
    for number in range(6):
        await asyncio.sleep(1.0)
        asked = await world.answer(f"hi {number}", headers=chat)
        assert asked.replica == first.replica


@pytest.mark.parametrize("by", ["launch", "operator"])
def test_by_backlog_only_if_so_configured(by: str) -> None:
    async def scenario(world: World) -> None:
        if by == "operator":
            world.configure(routing="backlog")
            await asyncio.sleep(0.1)
        for _ in range(6):
            asked = await world.answer(SYSTEM)
            assert asked.reason == "backlog"
            await asyncio.sleep(3.0)
        assert len({each.replica for each in world.answers}) == 2

    play(scenario, "m-0", "m-1", routing="backlog" if by == "launch" else "auto")


def in_turn(asked: Answer) -> bool:
    return asked.status == 200 and not asked.replica


@in_world("m-0", "m-1")
async def test_a_replica_without_a_lease_or_that_drains_gets_nothing(world: World) -> None:
    world.replicas["m-0"].drain()
    await asyncio.sleep(0.1)
    assert {(await world.answer(f"{n}")).replica for n in range(4)} == {"m-1"}
    world.replicas["m-0"].drain(None)
    world.replicas["m-1"].silence()
    await asyncio.sleep(11.0)
    assert {(await world.answer(f"{n}")).replica for n in range(4)} == {"m-0"}
    world.replicas["m-0"].silence()
    await asyncio.sleep(11.0)
    assert in_turn(await world.answer(stream=False))


@in_world("m-0", "m-1")
async def test_sessions_that_begin_together_are_spread(world: World) -> None:
    """The backlog alone would see no difference between two requests that are far apart."""
    for number in range(20):
        await world.answer(text(f"session {number}", 3000 if number % 2 else 100))
        await asyncio.sleep(2.0)
    long = [each.replica for each in world.answers[1::2]]
    assert 3 <= long.count("m-0") <= 7


@in_world("m-0", "m-1")
async def test_a_replica_that_leaves_is_counted_no_longer(world: World) -> None:
    for number in range(4):
        world.ask(f"{number}")
    await world.done()
    assert world.router.report()["replicas"].keys() == {"m-0", "m-1"}
    world.remove("m-0")
    await asyncio.sleep(0.1)
    assert world.router.report()["replicas"].keys() == {"m-1"}


@in_world("m-0", "m-1")
async def test_requests_of_another_router_count(world: World) -> None:
    world.replicas["m-0"].other(text("other", 50_000))
    await asyncio.sleep(0.1)
    names = itertools.count()
    assert {(await world.answer(f"{next(names)}")).replica for _ in range(4)} == {"m-1"}

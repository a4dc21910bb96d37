"""A request whose replica fails before it answers is answered by another one. A prefill replica
computes the prompt of a divided request, with one token to answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import xoscar as xo

from tests.serving.routing.scenarios import STREAMS, search
from tests.world.world import CHUNK, REPORTS, ModelActor, World, in_world, text
from xinference_xavier.errors import ReplicaNotServingError
from xinference_xavier.protocol.load import mark_of
from xinference_xavier.serving.routed_model import SILENCE, RoutedModel, one_token

SECOND = text("a second", 10_000)
"""To compute it takes a second."""


async def begun(world: World, answer: int = 1, **how: Any) -> tuple[Any, str, str]:
    """A request, its replica, which computes it, and another one."""
    asked = world.ask(SECOND, answer, **how)
    await asyncio.sleep(0.5)
    (its,) = (name for name, each in world.replicas.items() if each.asked)
    return asked, its, next(name for name in world.replicas if name != its)


# -- moves -------------------------------------------------------------------------------------


@STREAMS
@in_world("m-0", "m-1")
async def test_a_replica_that_dies_before_its_first_word(world: World, stream: bool) -> None:
    answer, its, other = await begun(world, stream=stream)
    world.replicas[its].die()
    await world.done()
    assert (answer.status, answer.replica) == (200, other)
    assert world.replicas[its].asked == world.replicas[other].asked
    assert world.router.counts.moved == 1


@STREAMS
@in_world("m-0", "m-1")
async def test_a_replica_that_hangs_until_the_tracker_loses_it(world: World, stream: bool) -> None:
    for each in world.replicas.values():
        each.hangs = True
    answer, its, other = await begun(world, stream=stream)
    world.replicas[other].hangs = False
    world.replicas[its].leave()
    await world.done()
    assert (answer.status, answer.replica) == (200, other)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Rate limit reached for the model. Request limit 1 for the model: m-0"),
        ConnectionRefusedError("nobody listens"),
        xo.ActorNotExist("the model has ended"),
        type("EngineDeadError", (Exception,), {})("the engine core died"),
    ],
    ids=lambda error: type(error).__name__,
)
@in_world("m-0", "m-1")
async def test_a_replica_that_fails_a_request_gets_no_other_for_a_while(
    world: World, error: Exception
) -> None:
    world.replicas["m-0"].fails = error
    assert {(await world.answer()).replica for _ in range(8)} == {"m-1"}
    assert len(world.replicas["m-0"].asked) == 1
    world.replicas["m-0"].fails = None
    await asyncio.sleep(31.0)
    assert "m-0" in {(await world.answer()).replica for _ in range(8)}


@STREAMS
@in_world("m-0", "m-1", "m-2")
async def test_a_request_moves_only_once_and_then_its_error_is_the_client_s(
    world: World, stream: bool
) -> None:
    """It may be the cause."""
    for each in world.replicas.values():
        each.fails = ConnectionResetError("the replica's process has ended")
    answer = await world.answer(stream=stream)
    assert "the replica's process has ended" in answer.body.decode()
    assert sum(len(each.asked) for each in world.replicas.values()) == 2


@in_world("m-0")
async def test_without_another_replica_the_error_is_the_client_s(world: World) -> None:
    world.replicas["m-0"].fails = ConnectionRefusedError("nobody listens")
    assert "nobody listens" in (await world.answer(stream=False)).body.decode()


@in_world("m-0", "m-1", "m-2")
async def test_a_replica_that_is_not_there_yet_costs_a_request_no_move(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(replica: str) -> None:
        if replica == "m-1":
            raise ReplicaNotServingError("it has just started")

    search(monkeypatch, find)
    world.replicas["m-0"].fails = ConnectionRefusedError("nobody listens")
    world.replicas["m-2"].other(SECOND)  # so it is chosen last
    await asyncio.sleep(0.1)
    assert (await world.answer()).replica == "m-2"
    assert world.router.counts.moved == 2


@in_world("m-0", "m-1")
async def test_an_answer_that_has_begun_ends_with_its_replica(world: World) -> None:
    answer, its, other = await begun(world, 1000)
    await asyncio.sleep(1.0)
    world.replicas[its].die()
    await world.done()
    assert (answer.status, answer.replica) == (200, its)
    assert b'"error"' in answer.body
    assert not world.replicas[other].asked
    assert world.router.counts.moved == 0


# -- streams -----------------------------------------------------------------------------------


@in_world("m-0")
async def test_the_end_of_a_stream_does_not_wait_for_its_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = ModelActor.decrease_serve_count

    async def slow(self: ModelActor, **_: Any) -> None:
        await asyncio.sleep(1.0)
        await leave(self)

    monkeypatch.setattr(ModelActor, "decrease_serve_count", slow)
    await world.answer()
    assert world.replicas["m-0"].serving == 1
    await asyncio.sleep(1.0)


async def routed(world: World) -> RoutedModel:
    """A model as xinference gets it. The test ends its route."""
    route = world.router.open()
    assert route is not None
    await world.router.place(route)
    actor = world.actors[route.replica]
    return RoutedModel(world.router, route, actor, SimpleNamespace())  # type: ignore[arg-type]


@in_world("m-0")
async def test_a_stream_that_nobody_closes_leaves_its_place_when_the_request_ends(
    world: World,
) -> None:
    model = await routed(world)
    await model.chat([], {"stream": True})
    world.router.end(model._route)


@in_world("m-0")
async def test_a_stream_that_begins_as_its_request_is_cancelled_leaves_its_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, begun = ModelActor.chat, asyncio.Event()

    async def noted(*args: Any, **kwargs: Any) -> Any:
        stream = await chat(*args, **kwargs)
        begun.set()
        return stream

    monkeypatch.setattr(ModelActor, "chat", noted)
    model = await routed(world)
    asking = asyncio.create_task(model.chat([], {"stream": True}))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    world.router.end(model._route)


@in_world("m-0")
async def test_an_abort_ends_although_the_replica_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ModelActor, "abort_request", hang)
    model = await routed(world)
    with pytest.raises(TimeoutError):
        await model.abort_request("r")
    world.router.end(model._route)


@in_world("m-0")
async def test_an_answer_that_has_begun_ends_once_its_lost_replica_is_silent(world: World) -> None:
    asked, replica = world.ask("short", 1000), world.replicas["m-0"]
    await asyncio.sleep(1.0)
    assert asked.first is not None
    replica.vanish()
    replica.leave()
    await world.done()
    assert asked.last == pytest.approx(1.0 + SILENCE, abs=0.1)
    assert b'"error"' in asked.body


@in_world("m-0")
async def test_an_answer_that_has_begun_outlives_its_replica_at_the_tracker(world: World) -> None:
    asked = world.ask("short", 1000)
    await asyncio.sleep(1.0)
    world.replicas["m-0"].leave()
    await world.done()
    assert asked.body.count(b"data:") == 2
    assert b'"error"' not in asked.body


# -- divided requests --------------------------------------------------------------------------


async def divide(world: World, *decoding: str) -> None:
    """One replica prefills. The others decode, and have an answer that a prefill would delay."""
    world.add("p", role="prefill", mark_key="p")
    for name in decoding:
        world.add(name, role="decode", mark_key=name).other(text(name, 100), 10_000)
    await asyncio.sleep(REPORTS + 0.1)


def prefill_requests(world: World) -> int:
    """Requests that the router knows at the prefill replica."""
    replicas = world.router._router.replicas.values()
    return sum(len(each.places) for each in replicas if each.uid == "p")


@STREAMS
@in_world()
async def test_both_replicas_get_the_request_at_the_same_time(world: World, stream: bool) -> None:
    await divide(world, "d")
    answer = await world.answer(SECOND, stream=stream)
    assert (answer.status, answer.replica, answer.reason) == (200, "d", "prefill")
    assert answer.body.decode().count('"text": "d"') == (2 if stream else 1)
    (prefill,), (name,) = world.replicas["p"].asked, world.replicas["d"].asked
    elsewhere = mark_of(name, "d")
    assert elsewhere is not None
    assert elsewhere.replica == "p now"
    assert name.startswith(prefill)
    assert prefill_requests(world) == 0
    assert world.router.counts.choices == {"prefill": 1}


@in_world()
async def test_a_prompt_without_a_whole_chunk_is_prefilled_where_it_is_answered(
    world: World,
) -> None:
    """There is nothing to fetch, however many answers the prefill delays."""
    await divide(world, "d")
    for number in range(9):
        world.replicas["d"].other(text(f"other {number}", 100), 10_000)
    await asyncio.sleep(REPORTS + 0.1)
    answer = await world.answer(text("short", CHUNK // 2))
    assert (answer.replica, answer.reason) == ("d", "backlog")


@in_world()
async def test_a_prefill_that_fails_is_counted_and_changes_nothing(world: World) -> None:
    await divide(world, "d")
    world.replicas["p"].fails = ValueError("no")
    answer = await world.answer(SECOND)
    assert (answer.status, answer.replica) == (200, "d")
    assert world.router.counts.failed_prefills == 1


@in_world()
async def test_a_request_that_ends_stops_its_prefill(world: World) -> None:
    await divide(world, "d")
    world.replicas["p"].hangs = True
    assert (await world.answer(SECOND)).replica == "d"
    await asyncio.sleep(0.1)
    assert world.replicas["p"].aborted == world.replicas["p"].asked
    assert len(world.replicas["p"].asked) == 1


@in_world()
async def test_a_divided_request_that_moves_is_marked_for_the_other_replica(world: World) -> None:
    """The prefill goes on, and keeps its replica busy. xinference aborts by the id that it gave."""
    await divide(world, "d-0", "d-1")
    for each in world.replicas.values():
        each.hangs = True
    asking = world.ask(SECOND)
    await asyncio.sleep(0.1)
    first, other = sorted(("d-0", "d-1"), key=lambda each: not world.replicas[each].asked)
    world.replicas[other].hangs = False
    world.replicas[first].leave()
    await asyncio.sleep(0.1)
    assert prefill_requests(world) == 1
    (marked,) = world.replicas[other].asked
    assert mark_of(marked, other) is not None
    asking.leave()
    await world.done()
    assert world.replicas[other].aborted == [marked]
    assert prefill_requests(world) == 0


@in_world()
async def test_a_killed_decode_replica_leaves_the_request_to_the_one_that_prefills(
    world: World,
) -> None:
    await divide(world, "d")
    world.replicas["d"].fails = ConnectionRefusedError("nobody listens")
    assert (await world.answer(SECOND)).replica == "p"
    prefill, name = world.replicas["p"].asked
    assert prefill == f"{name}:prefill", "it waits for nobody"


def test_only_the_prompt_is_computed() -> None:
    config = {"stream": True, "max_tokens": 9, "n": 2, "logprobs": 5, "seed": 3, "tools": []}
    greedy = {"stream": False, "max_tokens": 1, "n": 1, "temperature": 0}
    assert one_token(config) == {**greedy, "tools": []}
    assert one_token(None) == greedy

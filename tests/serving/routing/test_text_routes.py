"""The text routes of xinference itself, through the router."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import Request

from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES
from tests.serving.routing.scenarios import PATHS, STREAMS, assert_in_turn, assert_refused, search
from tests.world.virtual import run
from tests.world.world import CHUNK, ENGINE, REPORTS, World, in_world, text
from xinference_xavier.errors import ReplicaNotServingError, SupervisorError
from xinference_xavier.frontend.model_router import PATIENCE
from xinference_xavier.protocol.prefixes import Keeping, keeping_of
from xinference_xavier.routing.router import Router
from xinference_xavier.serving import routing
from xinference_xavier.serving.routing import RoutingMiddleware, current

ROUTES = pytest.mark.parametrize("path", TEXT_ROUTES)
SECOND = text("a second", 10_000)
"""To compute it takes a second."""


@STREAMS
@in_world("m-0", "m-1")
async def test_every_route_goes_where_its_prompt_was_computed_and_says_why(
    world: World, stream: bool
) -> None:
    for path in PATHS:
        prompt = text(path, 10 * CHUNK)
        first = await world.answer(prompt, path=path, stream=stream)
        assert first.headers["x-xavier-route"].startswith("backlog; backlog=0.000, fetch=0.000")
        await asyncio.sleep(5.0)
        again = await world.answer(prompt, path=path, stream=stream)
        assert (again.replica, again.reason) == (first.replica, "local")
        assert (first.status, again.status) == (200, 200)
        assert first.replica in first.body.decode()
    assert {each.replica for each in world.answers} == {"m-0", "m-1"}


# -- in turn -----------------------------------------------------------------------------------


@in_world("m-0", "m-1")
async def test_other_routes_and_models_go_in_turn_and_all_while_routing_is_off(
    world: World,
) -> None:
    assert not (await world.answer(path="/v1/messages/count_tokens")).replica
    assert_in_turn(await world.answer(model="another", stream=False))
    for mode in ("off", "auto"):
        world.configure(routing=mode)
        await asyncio.sleep(1.0)
        assert bool((await world.answer(stream=False)).replica) == (mode == "auto")


@in_world("m-0", "m-1")
async def test_a_replica_that_the_supervisor_does_not_admit_is_left_out_for_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone before the tracker knows, or has just started. Where no other one works, requests
    go in turn."""
    left_out = {"m-0"}

    async def find(replica: str) -> None:
        if replica in left_out:
            raise ReplicaNotServingError(f"{replica} is not there")

    search(monkeypatch, find)
    for _ in range(4):
        assert (await world.answer()).replica == "m-1"
    left_out.clear()
    await asyncio.sleep(1.0)
    assert {(await world.answer()).replica for _ in range(8)} == {"m-0", "m-1"}
    left_out.update(world.replicas)
    assert_in_turn(await world.answer(stream=False))


async def silent(*_: object) -> None:
    await asyncio.Event().wait()


async def broken(*_: object) -> None:
    raise ConnectionResetError("the supervisor has ended")


@pytest.mark.parametrize("find", [silent, broken])
@in_world("m-0", "m-1")
async def test_a_supervisor_that_does_not_answer_is_not_held_against_a_replica(
    world: World, monkeypatch: pytest.MonkeyPatch, find: Any
) -> None:
    with monkeypatch.context() as while_away:
        search(while_away, find)
        for path in TEXT_ROUTES:
            assert_in_turn(await world.answer(path=path, stream=False))
    await asyncio.sleep(REPORTS)
    assert world.router.counts.failures == 0
    assert {(await world.answer()).replica for _ in range(8)} == {"m-0", "m-1"}


def test_a_supervisor_that_cannot_be_found_ends_the_search_in_time() -> None:
    with pytest.raises(SupervisorError, match="does not say where replica m-rep0 is"):
        run(routing._model_of(silent, "m-rep0"))


@in_world("m-0", "m-1")
async def test_an_error_of_the_router_costs_no_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*_: object, **__: object) -> None:
        raise IndexError("a defect")

    monkeypatch.setattr(Router, "choose", choose)
    assert_in_turn(await world.answer(stream=False))
    assert world.router.counts.failures == 1


# -- refusals ----------------------------------------------------------------------------------


@ROUTES
@STREAMS
@in_world("m-0", "m-1", "m-2")
async def test_a_request_that_replicas_refuse_goes_to_another_one_or_waits(
    world: World, path: str, stream: bool
) -> None:
    """Requests of others fill the replicas."""
    first, second, third = world.replicas.values()
    first.limit = second.limit = 0
    for _ in range(3):
        answer = await world.answer(path=path, stream=stream)
        assert (answer.status, answer.replica) == (200, "m-2")
    third.limit = 0
    waits = world.ask("hi", path=path, stream=stream)
    await asyncio.sleep(PATIENCE - 10.0)
    second.limit = 1
    await world.done()
    assert (waits.status, waits.replica) == (200, "m-1")
    second.limit = 0
    refused = await world.answer(path=path, stream=stream)
    assert_refused(refused)
    assert refused.last == pytest.approx(refused.asked + PATIENCE, abs=0.1)


def refuses(world: World, replica: str) -> None:
    world.replicas[replica].limit = 0


def is_lost(world: World, replica: str) -> None:
    world.replicas[replica].fails = ConnectionRefusedError("nobody listens")


def dies_before_the_first_word(world: World, replica: str) -> None:
    asyncio.get_running_loop().call_later(0.5, world.replicas[replica].die)


def is_unknown_to_the_supervisor(world: World, replica: str) -> None:
    del world.actors[replica]


@ROUTES
@STREAMS
@pytest.mark.parametrize(
    "happens", [refuses, is_lost, dies_before_the_first_word, is_unknown_to_the_supervisor]
)
@in_world("m-0", "m-1", queue=0, request_limit=1)
async def test_a_request_that_may_not_wait_is_refused_if_its_replica(
    world: World, happens: Callable[[World, str], None], path: str, stream: bool
) -> None:
    running = world.ask(SECOND, 1000)
    await asyncio.sleep(0.1)
    (its,) = (name for name, each in world.replicas.items() if not each.asked)
    happens(world, its)
    assert_refused(await world.answer(SECOND, path=path, stream=stream))
    assert_refused(await world.answer(path=path, stream=stream))
    await world.done()
    assert (running.status, running.replica == its) == (200, False)


# -- clients -----------------------------------------------------------------------------------


@STREAMS
@in_world("m-0", request_limit=1)
async def test_a_client_that_goes_while_it_waits_leaves_the_queue(
    world: World, stream: bool
) -> None:
    world.ask(SECOND)
    await asyncio.sleep(0.1)
    gone = world.ask("gone", stream=stream)
    await asyncio.sleep(0.1)
    assert world.router.report()["waiting"] == 1
    gone.leave()
    await asyncio.sleep(0.1)
    assert world.router.report()["waiting"] == 0
    assert (await world.answer("stays", stream=stream)).status == 200
    assert world.replicas["m-0"].prompts[1:] == ["stays"]


@ROUTES
@in_world("m-0", engine=ENGINE._replace(prefill=100))
async def test_a_client_that_goes_before_the_first_byte_is_no_error(
    world: World, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """xinference's own middlewares wait for the answer to begin."""

    @world._app.middleware("http")
    async def around(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    answer = world.ask(SECOND, path=path)  # here it takes a hundred
    await asyncio.sleep(1.0)
    answer.leave()
    await world.done()
    assert answer.status == 200
    assert answer.last is not None
    assert answer.last < 50.0
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_only_requests_of_text_routes_are_remembered() -> None:
    """Nobody but their handlers reads the bodies of others."""
    seen = []

    async def app(*passed: Any) -> None:
        seen.append((*passed[:2], current()))

    receive: Any = object()
    scopes = [{"type": kind, "path": COMPLETIONS} for kind in ("lifespan", "websocket", "http")]
    for scope in scopes:
        await RoutingMiddleware(app)(scope, receive, receive)
    assert seen == [(scope, receive, None) for scope in scopes]


# -- prefixes ----------------------------------------------------------------------------------

CONTENTS: dict[str, Any] = {
    "story": {"prompt": "Once upon a time"},
    "guide": {"messages": [{"role": "system", "content": "You are a guide."}]},
    "poet": {"prompt": "A rose", "lora_name": "poet"},
    "poets": {"messages": [{"role": "user", "content": "A rose"}], "lora_name": "poet"},
}


async def named(model_uid: str, tenant: str, name: str) -> Any:
    return CONTENTS[name]


@STREAMS
@in_world("m-0", content_of=named)
async def test_a_prefix_of_another_kind_or_adapter_is_a_400_with_its_reason(
    world: World, stream: bool
) -> None:
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        (COMPLETIONS, "guide", {}, "'guide' has messages; use it on a route of chats"),
        (COMPLETIONS, "poet", {}, "'poet' belongs to adapter 'poet'"),
        (COMPLETIONS, "poet", {"lora_name": "clerk"}, "'poet' belongs to adapter 'poet'"),
        (COMPLETIONS, "story", {"lora_name": "poet"}, "belongs to the model without an adapter"),
        (CHAT, "story", {"prompt": "ignored"}, "'story' has a prompt; use it on the route of"),
    ]
    for path in PATHS[1:]:
        cases += [
            (path, "story", {}, "'story' has a prompt; use it on the route of completions"),
            (path, "poets", {}, "'poets' belongs to adapter 'poet'"),
        ]
    for path, name, more, reason in cases:
        answer = await world.answer(path=path, stream=stream, prefix_name=name, **more)
        assert answer.status == 400
        assert reason in answer.body.decode()
    assert not world.replicas["m-0"].asked


@pytest.mark.parametrize("mode", ["auto", "off"])
@in_world("m-0", content_of=named)
async def test_a_prefix_of_the_right_kind_and_adapter_goes_before_the_request(
    world: World, mode: str
) -> None:
    world.configure(routing=mode)
    await asyncio.sleep(1.0)
    poet = {"lora_name": "poet"}
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        (COMPLETIONS, "story", {}, "Once upon a time"),
        (COMPLETIONS, "poet", poet, "A rose"),
        (CHAT, "poets", poet, "A rose"),
        *((path, "guide", {}, "You are a guide.") for path in PATHS[1:]),
    ]
    for path, name, adapter, begins in cases:
        for way in ({"headers": {"x-xavier-prefix": name}}, {"prefix_name": name}):
            answer = await world.answer("hi", path=path, stream=False, **way, **adapter)
            assert (answer.status, bool(answer.replica)) == (200, mode == "auto")
            assert world.replicas["m-0"].prompts[-1] == begins + "hi"


class _Taken(ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("xinference has taken all threads")


@in_world("m-0", content_of=named)
async def test_a_prefix_needs_none_of_asyncio_s_threads(world: World) -> None:
    """On two cores, xinference's first API keeps all of them while it is relaunched."""
    asyncio.get_running_loop().set_default_executor(_Taken())
    assert (await world.answer("hi", prefix_name="story")).replica == "m-0"


@in_world("m-0")
async def test_a_prompt_is_kept_as_openai_s_clients_ask(world: World) -> None:
    for retention in ("24h", "for ever", None):
        await world.answer(prompt_cache_retention=retention)
    names = world.replicas["m-0"].asked
    assert [*filter(None, map(keeping_of, names))] == [Keeping(86400.0, 1.0)]

"""Real model actors behind the text routes, in processes of their own.

What an actor of another process raises has xoscar's mark; what the connection to it raises has
none. A stream is an object on both sides, which both must give back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import xoscar as xo
from PIL import UnidentifiedImageError

from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES
from tests.serving.routing.scenarios import STREAMS
from tests.serving.text_models import ModelProcess, TextModel
from tests.world.world import World
from xinference_xavier.serving import routing


@pytest.fixture(scope="module")
def model_process() -> Iterator[ModelProcess]:
    process = ModelProcess()
    yield process
    process.end()


class Api:
    """A world whose replicas are real actors. What it is told of them is that they have nothing to
    do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.models: Any = world.actors

    async def put(self, name: str, address: str) -> None:
        self.models[name] = await xo.create_actor(TextModel, name, address=address)
        await self.models[name].prepare()

    async def first(self) -> str:
        """The replica that a request occupies, once it does."""
        return await found(self._occupied)

    async def _occupied(self) -> str | None:
        serving = {name: await model.serving() for name, model in self.models.items()}
        return next((name for name, count in serving.items() if count), None)

    async def left(self) -> None:
        """Waits until no request occupies a replica any more."""

        async def nobody() -> bool:
            return await self._occupied() is None

        await found(nobody)


async def found(look: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(30):
        while not (result := await look()):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.001)
    return result


@pytest.fixture
async def api(model_process: ModelProcess) -> AsyncIterator[Api]:
    async with World("m-0", "m-1").serving() as world:
        api = Api(world)
        for name in ("m-0", "m-1"):
            await api.put(name, model_process.address)
        await found(lambda: asyncio.sleep(0, len(world.router.loads()) == 2))
        yield api
        await world.done()
        await api.left()
        assert not world.router._router.routes
        for model in api.models.values():
            await xo.destroy_actor(model)


async def test_routed_requests_keep_xinferences_correlation_id(api: Api) -> None:
    for path in TEXT_ROUTES:
        answer = await api.world.answer(path=path)
        assert (await api.models[answer.replica].asked())[-1] == answer.headers["x-request-id"]


@STREAMS
@pytest.mark.parametrize(
    "error",
    [
        UnidentifiedImageError("cannot identify image file"),
        OSError(28, "No space left on device"),
        TimeoutError("the image did not arrive"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_the_model_raises_is_the_error_of_the_request(
    api: Api, error: Exception, stream: bool
) -> None:
    """Before its stream is there, or before its first word."""
    for when in ("fails", "breaks") if stream else ("fails",):
        for model in api.models.values():
            await model.prepare(**{when: error})
        for path in TEXT_ROUTES:
            await api.world.answer(path=path, stream=stream)
            asked = [len(await model.asked()) for model in api.models.values()]
            assert sum(asked) == len(api.world.answers)
        assert all(each.closed_until == 0 for each in api.world.router._router.replicas.values())


async def test_a_killed_process_loses_only_answers_that_have_begun(api: Api) -> None:
    process = ModelProcess()
    others = api.models.pop("m-1")
    await api.put("m-1", process.address)
    await api.models["m-0"].prepare(limit=0)
    await api.models["m-1"].prepare(pauses=True)
    begun = api.world.ask("hi")
    await found(lambda: asyncio.sleep(0, begun.first))
    await api.models["m-1"].prepare(hangs=True)
    waits = api.world.ask("hi")
    await found(lambda: served(api.models["m-1"], 2))
    await api.models["m-0"].prepare()
    process.end()
    await api.world.done()
    after = await api.world.answer()
    assert (begun.replica, waits.replica, after.replica) == ("m-1", "m-0", "m-0")
    assert b'"error"' in begun.body
    assert b"error" not in waits.body + after.body
    api.models["m-1"] = others


async def served(model: Any, count: int) -> bool:
    return bool(await model.serving() == count)


@pytest.mark.parametrize("kept", [{}, {"prompt_cache_retention": "24h"}], ids=["plain", "kept"])
@pytest.mark.parametrize("how", [{"hangs": True}, {"pauses": True}], ids=["before", "after"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_client_that_goes_before_or_after_the_first_word_closes_the_stream(
    api: Api, path: str, how: dict[str, bool], kept: dict[str, str]
) -> None:
    """`prompt_cache_retention` puts a stream around it."""
    for model in api.models.values():
        await model.prepare(**how)
    answer = api.world.ask("hi", path=path, **kept)
    replica = await api.first()
    if "pauses" in how:
        await found(lambda: asyncio.sleep(0, answer.first))
    answer.leave()
    await api.left()
    await found(api.models[replica].closed)


async def test_while_a_supervisor_is_relaunched_replicas_are_found(pool: Any) -> None:
    """Only what xinference's gateway calls reads reaches the supervisor then."""
    from xinference.core.supervisor_upgrade import SupervisorGateway

    address = pool.external_address
    model = await xo.create_actor(TextModel, "m-0", address=address, uid="m-0")
    supervisor = await xo.create_actor(Finding, model, address=address, uid="supervisor")
    gateway = await xo.create_actor(SupervisorGateway, address=address, uid="gateway")
    await gateway.select_supervisor(supervisor)
    await gateway.prepare_supervisor_switch()

    async def get_supervisor_ref() -> Any:
        return gateway

    assert (await routing._model_of(get_supervisor_ref, "m-0")).uid == model.uid
    await gateway.release_supervisor()


class Finding(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A supervisor that knows one replica."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    async def get_model(self, name: str, xavier_replica: bool = False) -> Any:
        assert (name, xavier_replica) == ("m-0", True)
        return self._model

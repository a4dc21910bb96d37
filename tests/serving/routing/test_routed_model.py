"""A request whose replica fails before it answers is answered by another one, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.frontend.cluster import Cluster
from tests.serving.routing.replicas import Replica
from xinference_xavier.frontend.model_router import Route
from xinference_xavier.serving.routed_model import RoutedModel


class Serving:
    """Two replicas, and a request that goes to the first."""

    replicas: dict[str, Replica]
    route: Route
    model: RoutedModel

    async def start(self) -> Serving:
        self.cluster = Cluster("m-0", "m-1")
        self.replicas = {name: await Replica().start(name) for name in ("m-0", "m-1")}
        found = await self.cluster.router.route()
        assert found is not None
        self.route = found
        self.chosen = self.replicas[found.replica]
        (self.other_name,) = self.replicas.keys() - {found.replica}
        self.model = RoutedModel(self.cluster.router, found, self.chosen.model, self.connect)
        return self

    async def connect(self, replica: str) -> Any:
        return self.replicas[replica].model

    @property
    def first(self) -> str:
        return next(name for name, each in self.replicas.items() if each is self.chosen)

    async def chat(self, *words: str) -> list[str]:
        return [word async for word in await self.model.chat([*words], {}, request_id="r")]


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    serving = await Serving().start()
    yield serving
    await asyncio.gather(*(replica.stop() for replica in serving.replicas.values()))


async def test_it_behaves_like_the_chosen_replica(serving: Serving) -> None:
    assert await serving.chat("an", "answer") == ["an", "answer", "by", serving.first]
    assert await serving.model.generate("text", {}, request_id="g") == f"text by {serving.first}"
    assert await serving.model.is_vllm_backend()
    assert await serving.model.abort_request("r") == "done"
    assert serving.model.uid == serving.chosen.model.uid


async def test_the_router_knows_the_request_by_the_id_that_the_replica_reports(
    serving: Serving,
) -> None:
    await serving.model.generate("text", {}, request_id="given")
    await serving.model.generate("text", {})
    asked, _ = await serving.chosen.model.requests()
    assert asked[0] == "given"
    assert [*serving.cluster.router._names] == asked


async def test_a_replica_that_was_killed_before(serving: Serving) -> None:
    await serving.chosen.stop()
    assert await serving.chat("an", "answer") == ["an", "answer", "by", serving.other_name]
    assert serving.route.replica == serving.other_name
    assert serving.cluster.router.counts.moved == 1


async def test_a_replica_that_dies_before_its_first_word(serving: Serving) -> None:
    stream = await serving.model.chat(["hang"], {}, request_id="r")
    answering = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    serving.chosen.model = None
    await serving.chosen.stop()
    serving.cluster.tell(gone=[serving.first])
    with pytest.raises(TimeoutError):  # the other one hangs, too
        async with asyncio.timeout(0.2):
            await answering
    asked, _ = await serving.replicas[serving.other_name].model.requests()
    assert asked == ["r"]


async def test_a_replica_that_hangs_until_the_tracker_loses_it(serving: Serving) -> None:
    await serving.chosen.model.prepare(hangs=True)
    answering = asyncio.create_task(serving.model.generate("text", {}, request_id="r"))
    while not (await serving.chosen.model.requests())[0]:
        pass
    serving.cluster.tell(gone=[serving.first])
    assert await answering == f"text by {serving.other_name}"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Rate limit reached for the model. Request limit 1 for the model: m-0"),
        ConnectionRefusedError("nobody listens"),
        type("EngineDeadError", (Exception,), {})("the engine core died"),
    ],
)
async def test_a_replica_that_refuses(serving: Serving, error: Exception) -> None:
    class Refusing:
        async def generate(self, *args: Any, **kwargs: Any) -> None:
            raise error

    serving.model._model = Refusing()
    assert await serving.model.generate("text", {}) == f"text by {serving.other_name}"


async def test_an_error_of_the_request_itself_is_the_clients(serving: Serving) -> None:
    await serving.chosen.model.prepare(fails=ValueError("the prompt is too long"))
    with pytest.raises(ValueError, match="the prompt is too long"):
        await serving.chat("an", "answer")
    assert serving.cluster.router.counts.moved == 0


async def test_a_request_moves_only_once(serving: Serving) -> None:
    for replica in serving.replicas.values():
        await replica.stop()
    with pytest.raises(ConnectionRefusedError):
        await serving.chat("an", "answer")
    assert serving.cluster.router.counts.moved == 1


async def test_an_answer_that_has_begun_ends_with_its_replica(serving: Serving) -> None:
    stream = await serving.model.chat(["an", "fail"], {}, request_id="r")
    assert await anext(stream) == "an"
    with pytest.raises(ConnectionResetError):
        await anext(stream)
    assert not (await serving.replicas[serving.other_name].model.requests())[0]


async def test_an_error_before_the_first_word_of_a_stream_moves_it(serving: Serving) -> None:
    stream = await serving.model.chat(["fail"], {}, request_id="r")
    with pytest.raises(ConnectionResetError):  # of the other one
        await anext(stream)
    assert [len((await each.model.requests())[0]) for each in serving.replicas.values()] == [1, 1]


async def test_an_abandoned_stream_is_closed(serving: Serving) -> None:
    stream = await serving.model.chat(["an", "hang"], {}, request_id="r")
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_without_another_replica_the_error_is_the_clients(serving: Serving) -> None:
    serving.cluster.tell(gone=[serving.other_name])
    await serving.chosen.stop()
    with pytest.raises(ConnectionRefusedError):
        await serving.chat("an", "answer")

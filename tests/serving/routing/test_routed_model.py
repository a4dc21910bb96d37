"""A request whose replica fails before it answers is answered by another one, once. A prefill
replica computes the prompt of a divided request, with one token to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import xoscar as xo

from tests.frontend.cluster import Cluster, document
from tests.serving.text_models import TextModel, text_of
from xinference_xavier.errors import ReplicaNotServingError
from xinference_xavier.frontend.model_router import Route
from xinference_xavier.protocol.load import mark_of
from xinference_xavier.serving.model_proxy import ModelProxy
from xinference_xavier.serving.routed_model import RoutedModel, one_token

STREAM = {"stream": True}
ENDED = ConnectionResetError("the replica's process has ended")


class Replica:
    """One replica, with a pool of its own."""

    pool: Any
    model: Any

    async def start(self, name: str) -> Replica:
        self.pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
        address = self.pool.external_address
        self.model = await xo.create_actor(TextModel, name, address=address, uid=name)
        await self.model.prepare()
        return self

    async def stop(self) -> None:
        await self.pool.stop()


class Serving:
    """Two replicas, and a request that goes to the `first` of them."""

    replicas: dict[str, Replica]
    route: Route
    model: RoutedModel

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def start(self, *replicas: str, **asked: Any) -> Serving:
        self.replicas = {name: await Replica().start(name) for name in replicas}
        found = await self.cluster.router.route(**asked)
        assert found is not None
        self.route, self.first = found, found.replica
        self.chosen = self.replicas[self.first]
        self.other, *_ = self.replicas.keys() - {self.first}
        self.model = RoutedModel(self.cluster.router, found, self.chosen.model, self.connect)
        return self

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self.replicas.values()))

    async def connect(self, replica: str) -> Any:
        return self.replicas[replica].model

    async def asked(self, replica: str) -> list[str]:
        """The ids of its requests."""
        return [each.request_id for each in await self.replicas[replica].model.asked()]

    async def generate(self, **how: Any) -> str:
        return text_of(await self.model.generate("text", {}, **how))

    async def stream(self) -> Any:
        return await self.model.chat([], STREAM, request_id="r")

    async def chat(self) -> list[str]:
        return [text_of(part) async for part in await self.stream()]


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    serving = await Serving(Cluster("m-0", "m-1")).start("m-0", "m-1")
    yield serving
    await serving.stop()


async def test_it_behaves_like_the_chosen_replica(serving: Serving) -> None:
    assert await serving.chat() == ["by", serving.first]
    assert await serving.generate() == f"by {serving.first}"
    assert await serving.model.is_vllm_backend()
    assert await serving.model.abort_request("r", block_duration=30) == "done"
    assert serving.model.uid == serving.chosen.model.uid


async def test_the_router_knows_the_request_by_the_id_that_the_replica_reports(
    serving: Serving,
) -> None:
    await serving.generate(request_id="given")
    await serving.generate()
    asked = await serving.asked(serving.first)
    assert asked[0] == "given"
    assert [*serving.cluster.router._names] == asked


async def test_a_replica_that_was_killed_before(serving: Serving) -> None:
    await serving.chosen.stop()
    assert await serving.chat() == ["by", serving.other]
    assert serving.route.replica == serving.other
    assert serving.cluster.router.counts.moved == 1


async def test_a_replica_that_dies_before_its_first_word(serving: Serving) -> None:
    for replica in serving.replicas.values():
        await replica.model.prepare(hangs=True)
    answering = asyncio.create_task(anext(await serving.stream()))
    await asyncio.sleep(0)
    serving.chosen.model = None
    await serving.chosen.stop()
    serving.cluster.tell(gone=[serving.first])
    while not await serving.asked(serving.other):
        pass
    answering.cancel()  # the other one hangs
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert await serving.asked(serving.other) == ["r"]


async def test_a_replica_that_hangs_until_the_tracker_loses_it(serving: Serving) -> None:
    await serving.chosen.model.prepare(hangs=True)
    answering = asyncio.create_task(serving.generate())
    while not await serving.asked(serving.first):
        pass
    serving.cluster.tell(gone=[serving.first])
    assert await answering == f"by {serving.other}"


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
    assert await serving.generate() == f"by {serving.other}"


async def test_a_request_moves_only_once(serving: Serving) -> None:
    for replica in serving.replicas.values():
        await replica.stop()
    with pytest.raises(ConnectionRefusedError):
        await serving.chat()
    assert serving.cluster.router.counts.moved == 1


async def test_an_answer_that_has_begun_ends_with_its_replica(serving: Serving) -> None:
    stream = await serving.stream()
    assert text_of(await anext(stream)) == "by"
    await serving.chosen.model.prepare(breaks=ENDED)
    with pytest.raises(ConnectionResetError):
        await anext(stream)
    assert not await serving.asked(serving.other)


async def test_an_error_before_the_first_word_of_a_stream_moves_it(serving: Serving) -> None:
    for replica in serving.replicas.values():
        await replica.model.prepare(breaks=ENDED)
    with pytest.raises(ConnectionResetError):  # of the other one
        await serving.chat()
    assert [len(await serving.asked(name)) for name in serving.replicas] == [1, 1]


async def left(serving: Serving) -> None:
    """Waits until no request occupies the first replica any more."""
    async with asyncio.timeout(30):
        while await serving.chosen.model.serving() or not await serving.chosen.model.closed():
            pass


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kept", [False, True])
async def test_an_abandoned_stream_is_closed_and_leaves_its_place(
    serving: Serving, kept: bool, begun: bool
) -> None:
    """`cache_control` and `prompt_cache_retention` put a stream around it."""
    asked: Any = ModelProxy(serving.model, prompt_s=60.0) if kept else serving.model
    stream = await asked.chat([], STREAM)
    if begun:
        await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await left(serving)


async def test_a_stream_that_nobody_closes_leaves_its_place_when_the_request_ends(
    serving: Serving,
) -> None:
    await serving.stream()
    serving.cluster.router.end(serving.route)
    await left(serving)


async def test_the_end_of_a_stream_does_not_wait_for_its_place(serving: Serving) -> None:
    replica, goes_on = serving.chosen.model, asyncio.Event()

    async def decrease_serve_count() -> None:
        await goes_on.wait()
        await replica.decrease_serve_count()

    serving.model._model = SimpleNamespace(
        chat=replica.chat, decrease_serve_count=decrease_serve_count
    )
    stream = await serving.stream()
    assert [text_of(part) async for part in stream] == ["by", serving.first]
    await stream.aclose()
    assert await replica.serving() == 1
    goes_on.set()
    await left(serving)


async def test_a_stream_that_begins_as_its_request_is_cancelled_leaves_its_place(
    serving: Serving,
) -> None:
    replica, begun = serving.chosen.model, asyncio.Event()

    async def chat(*args: Any, **kwargs: Any) -> Any:
        stream = await replica.chat(*args, **kwargs)
        begun.set()
        return stream

    serving.model._model = SimpleNamespace(
        chat=chat, decrease_serve_count=replica.decrease_serve_count
    )
    asking = asyncio.create_task(serving.stream())
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await left(serving)


async def test_without_another_replica_the_error_is_the_clients(serving: Serving) -> None:
    serving.cluster.tell(gone=[serving.other])
    await serving.chosen.stop()
    with pytest.raises(ConnectionRefusedError):
        await serving.chat()


async def test_a_replica_that_is_not_there_yet_costs_a_request_no_move(serving: Serving) -> None:
    serving.cluster.join("m-2")
    connect = serving.connect

    async def not_yet(replica: str) -> Any:
        if replica == "m-2":
            raise ReplicaNotServingError("it has just started")
        return await connect(replica)

    serving.model._connect = not_yet
    serving.cluster.tell(serving.cluster.load(serving.other, 60.0))
    await serving.chosen.stop()
    assert await serving.generate() == f"by {serving.other}"
    assert serving.cluster.router.counts.moved == 2


# -- a divided request ------------------------------------------------------------------------


def join(cluster: Cluster, **roles: Any) -> None:
    """Replicas by their roles. Each that decodes has a request, which a prefill would delay."""
    for name, role in roles.items():
        cluster.serving = cluster.serving._replace(role=role, mark_key=name)
        cluster.join(name)
        cluster.tell(cluster.load(name, requests=int(role == "decode")))


@pytest.fixture
async def divided() -> AsyncIterator[Serving]:
    """A replica that decodes, and one that prefills for it."""
    cluster = Cluster()
    join(cluster, decode="decode", prefill="prefill")
    divided = await Serving(cluster).start("prefill", "decode", text=document("d"), whole=False)
    yield divided
    await divided.stop()


async def prefilled(divided: Serving) -> None:
    assert divided.route.prefill is not None
    await divided.route.prefill


async def test_both_replicas_get_the_request_at_the_same_time(divided: Serving) -> None:
    assert await divided.generate(request_id="r") == "by decode"
    await prefilled(divided)
    assert await divided.asked("prefill") == ["r:prefill"]
    (name,) = await divided.asked("decode")
    elsewhere = mark_of(name, "decode")
    assert elsewhere is not None
    assert elsewhere.replica == "prefill now"
    assert divided.cluster.router.loads()["prefill"].requests == 0
    assert divided.cluster.router.counts.choices == {"prefill": 1}


async def test_a_stream_comes_from_the_replica_that_decodes(divided: Serving) -> None:
    assert await divided.chat() == ["by", "decode"]


async def test_xinference_aborts_by_the_id_that_it_gave(divided: Serving) -> None:
    await divided.generate(request_id="r")
    await divided.model.abort_request("r")
    decode = divided.replicas["decode"].model
    assert await decode.aborted() == await divided.asked("decode")


async def test_a_prefill_that_fails_is_counted_and_changes_nothing(divided: Serving) -> None:
    await divided.replicas["prefill"].model.prepare(fails=ValueError("no"))
    assert await divided.generate(request_id="r") == "by decode"
    await prefilled(divided)
    assert divided.cluster.router.counts.failed_prefills == 1


async def test_a_request_that_ends_stops_its_prefill(divided: Serving) -> None:
    await divided.replicas["prefill"].model.prepare(hangs=True)
    await divided.generate(request_id="r")
    while not await divided.asked("prefill"):
        pass
    divided.cluster.router.end(divided.route)
    with pytest.raises(asyncio.CancelledError):
        await prefilled(divided)
    assert await divided.replicas["prefill"].model.aborted() == ["r:prefill"]


async def test_a_divided_request_that_moves_is_marked_for_the_other_replica() -> None:
    """The prefill goes on, and keeps its replica busy."""
    cluster = Cluster()
    join(cluster, **{"prefill": "prefill", "d-0": "decode", "d-1": "decode"})
    serving = Serving(cluster)
    await serving.start("prefill", "d-0", "d-1", text=document("d"), whole=False)
    await serving.replicas["prefill"].model.prepare(hangs=True)
    await serving.chosen.stop()
    answer, another = await serving.generate(request_id="r"), serving.route.replica
    assert answer == f"by {another}" != f"by {serving.first}"
    (name,) = await serving.asked(another)
    assert mark_of(name, another) is not None
    assert cluster.router.loads()["prefill"].requests == 1
    await serving.model.abort_request("r")
    assert await serving.replicas[another].model.aborted() == [name]
    cluster.router.end(serving.route)
    assert cluster.router.loads()["prefill"].requests == 0
    await serving.stop()


async def test_a_killed_decode_replica_leaves_the_request_to_another(divided: Serving) -> None:
    await divided.replicas["decode"].stop()
    assert await divided.generate(request_id="r") == "by prefill"
    assert set(await divided.asked("prefill")) == {"r:prefill", "r"}, "it waits for nobody"


def test_only_the_prompt_is_computed() -> None:
    config = {"stream": True, "max_tokens": 9, "n": 2, "logprobs": 5, "seed": 3, "tools": []}
    greedy = {"stream": False, "max_tokens": 1, "n": 1, "temperature": 0}
    assert one_token(config) == {**greedy, "tools": []}
    assert one_token(None) == greedy

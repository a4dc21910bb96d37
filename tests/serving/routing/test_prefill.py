"""A prefill replica computes the prompt of a request, with one token to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.frontend.cluster import Cluster, document
from tests.serving.routing.replicas import Replica
from xinference_xavier.frontend.model_router import Route
from xinference_xavier.protocol.load import mark_of
from xinference_xavier.serving.routed_model import RoutedModel, one_token


class Serving:
    """A prefill replica, one that decodes, and a request that is divided."""

    route: Route
    model: RoutedModel

    async def start(self) -> Serving:
        self.cluster = Cluster()
        self.cluster.serving = self.cluster.serving._replace(role="decode", prefill_threshold=0)
        self.cluster.join("decode")
        self.cluster.serving = self.cluster.serving._replace(role="prefill")
        self.cluster.join("prefill")
        self.replicas = {name: await Replica().start(name) for name in ("prefill", "decode")}
        found = await self.cluster.router.route(document("d"), whole=False)
        assert found is not None
        self.route = found
        decode = self.replicas["decode"].model
        self.model = RoutedModel(self.cluster.router, found, decode, self.connect)
        return self

    async def connect(self, replica: str) -> Any:
        return self.replicas[replica].model

    async def asked(self, replica: str) -> list[str]:
        asked, _ = await self.replicas[replica].model.requests()
        return list(asked)

    async def prefilled(self) -> None:
        assert self.route.prefill is not None
        await self.route.prefill


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    serving = await Serving().start()
    yield serving
    await asyncio.gather(*(replica.stop() for replica in serving.replicas.values()))


async def test_both_replicas_get_the_request_at_the_same_time(serving: Serving) -> None:
    assert await serving.model.generate("text", {}, request_id="r") == "text by decode"
    await serving.prefilled()
    assert await serving.asked("prefill") == ["r:prefill"]
    (name,) = await serving.asked("decode")
    elsewhere = mark_of(name, "")
    assert elsewhere is not None
    assert elsewhere.replica == "prefill now"
    assert serving.cluster.router.loads()["prefill"].requests == 0
    assert serving.cluster.router.counts.choices == {"prefill": 1}


async def test_a_stream_comes_from_the_replica_that_decodes(serving: Serving) -> None:
    stream = await serving.model.chat(["an", "answer"], {"stream": True}, request_id="r")
    assert [word async for word in stream] == ["an", "answer", "by", "decode"]


async def test_xinference_aborts_by_the_id_that_it_gave(serving: Serving) -> None:
    await serving.model.generate("text", {}, request_id="r")
    await serving.model.abort_request("r")
    _, aborted = await serving.replicas["decode"].model.requests()
    assert aborted == await serving.asked("decode")


async def test_a_prefill_that_fails_is_counted_and_changes_nothing(serving: Serving) -> None:
    await serving.replicas["prefill"].model.prepare(fails=ValueError("no"))
    assert await serving.model.generate("text", {}, request_id="r") == "text by decode"
    await serving.prefilled()
    assert serving.cluster.router.counts.failed_prefills == 1


async def test_a_request_that_ends_stops_its_prefill(serving: Serving) -> None:
    await serving.replicas["prefill"].model.prepare(hangs=True)
    await serving.model.generate("text", {}, request_id="r")
    while not await serving.asked("prefill"):
        pass
    serving.cluster.router.end(serving.route)
    with pytest.raises(asyncio.CancelledError):
        await serving.prefilled()
    _, aborted = await serving.replicas["prefill"].model.requests()
    assert aborted == ["r:prefill"]


async def test_a_killed_decode_replica_leaves_the_request_to_another(serving: Serving) -> None:
    await serving.replicas["decode"].stop()
    assert await serving.model.generate("text", {}, request_id="r") == "text by prefill"


def test_only_the_prompt_is_computed() -> None:
    config = {"stream": True, "max_tokens": 9, "n": 2, "logprobs": 5, "seed": 3, "tools": []}
    greedy = {"stream": False, "max_tokens": 1, "n": 1, "temperature": 0}
    assert one_token(config) == {**greedy, "tools": []}
    assert one_token(None) == greedy

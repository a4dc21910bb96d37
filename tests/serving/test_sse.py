"""The stream of a model's sharing, as a listener receives it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
import xoscar as xo
from fastapi import FastAPI
from uvicorn.lifespan.off import LifespanOff

from tests.serving.supervisors import gateway_to, join
from tests.tracker_pools import create_tracker
from xinference_xavier.serving import sse as module
from xinference_xavier.serving.gateway import TrackerGateway
from xinference_xavier.serving.sse import Listeners, Stream, live


@pytest.fixture
async def trackers(supervisor: Any, monkeypatch: pytest.MonkeyPatch) -> TrackerGateway:
    monkeypatch.setattr(module, "STATUS_INTERVAL", 0.02)
    monkeypatch.setattr(module, "RETRY_PAUSE", 0.01)
    return gateway_to(supervisor)


def messages_of(trackers: TrackerGateway) -> AsyncIterator[dict[str, str]]:
    """The stream of a listener who may not ask the model."""
    return live(trackers, "m", lambda model_uid: False)


async def heard(messages: AsyncIterator[dict[str, str]], kind: str) -> dict[str, Any]:
    """The data of the next message of this kind."""
    async for message in messages:
        if message["event"] == kind:
            data: dict[str, Any] = json.loads(message["data"])
            return data
    raise AssertionError(f"the stream ended without {kind}")


async def test_the_stream_begins_with_history_recent_events_and_the_status(
    trackers: TrackerGateway, tracker: Any
) -> None:
    await join(tracker, "a", "m-0")
    messages = messages_of(trackers)
    kinds = [(await anext(messages))["event"] for _ in range(3)]
    assert kinds == ["history", "event", "status"]


async def test_the_status_is_repeated(trackers: TrackerGateway, tracker: Any) -> None:
    messages = messages_of(trackers)
    assert (await heard(messages, "status"))["replicas"] == []
    await join(tracker, "a", "m-0")
    while not (report := await heard(messages, "status"))["replicas"]:
        pass
    assert report["replicas"][0]["replica"] == "m-0"


async def test_a_listener_sees_of_a_status_what_it_may(
    trackers: TrackerGateway, tracker: Any
) -> None:
    trackers.prefixes = lambda model_uid: {"prefixes": [{"name": f"guide of {model_uid}"}]}
    seen = await heard(live(trackers, "m", lambda model_uid: model_uid == "m"), "status")
    assert seen["prefixes"] == [{"name": "guide of m"}]
    assert (await heard(messages_of(trackers), "status"))["prefixes"] == []


async def test_events_come_as_they_happen(
    trackers: TrackerGateway, tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not wait for the next status."""
    monkeypatch.setattr(module, "STATUS_INTERVAL", 3600.0)
    messages = messages_of(trackers)
    await heard(messages, "status")
    await tracker.set_enabled(False)
    event = await heard(messages, "event")
    assert (event["event"], event["enabled"]) == ("SharingSwitched", False)
    await join(tracker, "a", "m-0")
    event = await heard(messages, "event")
    assert (event["event"], event["replica"]) == ("ReplicaJoined", "m-0")


async def test_the_stream_begins_with_only_the_latest_events(
    trackers: TrackerGateway, tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RECENT", 2)
    for name in ("m-0", "m-1", "m-2"):
        await join(tracker, name, name)
    messages = messages_of(trackers)
    assert [(await heard(messages, "event"))["replica"] for _ in range(2)] == ["m-1", "m-2"]


async def test_the_stream_waits_for_a_tracker_that_is_away(
    trackers: TrackerGateway, supervisor: Any, tracker: Any
) -> None:
    """It says so once, and then begins again, because the next tracker may know less or more."""
    messages = messages_of(trackers)
    await heard(messages, "status")
    await supervisor.leave()
    assert await heard(messages, "unavailable") == {"detail": "the tracker of 'm' does not answer"}
    await supervisor.leave(False)
    assert (await anext(messages))["event"] == "history"


async def test_the_events_of_a_replaced_tracker_are_its_own(
    trackers: TrackerGateway, address: str, tracker: Any
) -> None:
    messages = messages_of(trackers)
    await join(tracker, "a", "m-0")
    assert (await heard(messages, "event"))["replica"] == "m-0"
    await xo.destroy_actor(tracker)
    successor = await create_tracker(address, "m")
    await join(successor, "b", "m-1")
    assert (await heard(messages, "event"))["replica"] == "m-1"


async def test_the_stream_ends_with_the_model(
    trackers: TrackerGateway, supervisor: Any, tracker: Any
) -> None:
    messages = messages_of(trackers)
    await heard(messages, "status")
    await xo.destroy_actor(tracker)
    await supervisor.put("m", None)
    assert await heard(messages, "gone") == {"detail": "model 'm' does not share its cache here"}
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def endless() -> AsyncIterator[dict[str, str]]:
    while True:
        yield {"data": "and so on"}
        await asyncio.sleep(0.01)


def app_of(messages: Callable[[], AsyncIterator[dict[str, str]]]) -> FastAPI:
    app, listeners = FastAPI(), Listeners()

    @app.get("/")
    async def listen() -> Stream:
        return Stream(listeners, messages())

    return app


class Listener:
    """A request for a stream, until it is cancelled."""

    def __init__(self, app: FastAPI) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status.set_result(message["status"])

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


async def test_only_so_many_listen_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all come at once, and none has received anything."""
    monkeypatch.setattr(module, "MAX_LISTENERS", 2)
    app = app_of(endless)
    listeners = [Listener(app) for _ in range(5)]
    statuses = await asyncio.gather(*(each.status for each in listeners))
    assert sorted(statuses) == [200, 200, 503, 503, 503]
    for each in listeners:
        await each.leave()
    late = Listener(app)
    assert await late.status == 200
    await late.leave()


async def test_a_refused_stream_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTENERS", 0)
    transport = httpx.ASGITransport(app_of(endless))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        answer = await client.get("/")
    assert answer.status_code == 503
    assert answer.json() == {"detail": "0 streams are open; close another page first"}


async def test_a_stream_ends_so_that_its_listeners_rights_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_LIFE", 0.3)
    transport = httpx.ASGITransport(app_of(endless))
    async with (
        asyncio.timeout(30),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        assert "and so on" in (await client.get("/")).text


def draining_server(app: FastAPI) -> Any:
    from xinference.deploy.api_worker import HostedServer

    config = uvicorn.Config(app, log_level="critical", lifespan="off")
    server = HostedServer(config, None, {})
    config.lifespan_class = LifespanOff  # its own waits for xinference
    server.notify = nothing
    server.writer = SimpleNamespace(close=lambda: None, wait_closed=nothing)
    return server


async def nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("silent", [True, False])
async def test_a_server_that_drains_ends_its_streams(silent: bool) -> None:
    """xinference relaunches its API: the old process stays until its last connection is closed."""

    async def messages() -> AsyncIterator[dict[str, str]]:
        yield {"data": "the first"}
        if silent:
            await asyncio.Event().wait()
        async for each in endless():
            yield each

    module.notice_servers()
    server = draining_server(app_of(messages))
    server.capture_signals = nullcontext
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(timeout=30) as client, client.stream("GET", url) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "data: the first"
            server.begin_drain()
            async for _ in lines:
                pass
            await serving
    assert answer.headers["connection"] == "close"

"""The stream of a model's sharing, as a listener receives it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo
from fastapi import HTTPException

from xinference_xavier.errors import NotFoundError
from xinference_xavier.protocol.tracker import Member, Settings, tracker_uid
from xinference_xavier.serving import sse as module
from xinference_xavier.serving.sse import Listeners, live
from xinference_xavier.serving.tracker_gateway import TrackerGateway
from xinference_xavier.tracker.actor import BlockTracker


class Supervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A supervisor that may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = self.knows_it = False

    async def switch(self, *, away: bool, knows_it: bool) -> None:
        self.away, self.knows_it = away, knows_it

    async def xavier_tracker_address(self, model_uid: str) -> str:
        if self.away:
            raise ConnectionRefusedError
        if not self.knows_it:
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        return str(self.address)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    async with pool:
        yield pool.external_address


@pytest.fixture
async def supervisor(address: str) -> Any:
    supervisor = await xo.create_actor(Supervisor, address=address, uid="supervisor")
    await supervisor.switch(away=False, knows_it=True)
    return supervisor


async def create_tracker(address: str) -> Any:
    return await xo.create_actor(BlockTracker, "m", address=address, uid=tracker_uid("m"))


@pytest.fixture
async def tracker(address: str) -> Any:
    return await create_tracker(address)


@pytest.fixture
async def trackers(supervisor: Any, monkeypatch: pytest.MonkeyPatch) -> TrackerGateway:
    monkeypatch.setattr(module, "STATUS_INTERVAL", 0.02)
    monkeypatch.setattr(module, "RETRY_PAUSE", 0.01)

    async def get_supervisor_ref() -> Any:
        return supervisor

    return TrackerGateway(get_supervisor_ref)


async def heard(messages: AsyncIterator[dict[str, str]], kind: str) -> dict[str, Any]:
    """The data of the next message of this kind."""
    async for message in messages:
        if message["event"] == kind:
            data: dict[str, Any] = json.loads(message["data"])
            return data
    raise AssertionError(f"the stream ended without {kind}")


async def join(tracker: Any, incarnation: str, name: str) -> None:
    await tracker.join("ns", Member(incarnation, "127.0.0.1:1"), 36, Settings(), name)


async def test_the_stream_begins_with_history_recent_events_and_the_status(
    trackers: TrackerGateway, tracker: Any
) -> None:
    await join(tracker, "a", "m-0")
    messages = live(trackers, "m")
    kinds = [(await anext(messages))["event"] for _ in range(3)]
    assert kinds == ["history", "event", "status"]


async def test_the_status_is_repeated(trackers: TrackerGateway, tracker: Any) -> None:
    messages = live(trackers, "m")
    assert (await heard(messages, "status"))["replicas"] == []
    await join(tracker, "a", "m-0")
    while not (report := await heard(messages, "status"))["replicas"]:
        pass
    assert report["replicas"][0]["replica"] == "m-0"


async def test_events_come_as_they_happen(
    trackers: TrackerGateway, tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not wait for the next status."""
    monkeypatch.setattr(module, "STATUS_INTERVAL", 3600.0)
    messages = live(trackers, "m")
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
    messages = live(trackers, "m")
    assert [(await heard(messages, "event"))["replica"] for _ in range(2)] == ["m-1", "m-2"]


async def test_the_stream_waits_for_a_tracker_that_is_away(
    trackers: TrackerGateway, supervisor: Any, tracker: Any
) -> None:
    """It says so once, and then begins again, because the next tracker may know less or more."""
    messages = live(trackers, "m")
    await heard(messages, "status")
    await supervisor.switch(away=True, knows_it=True)
    assert await heard(messages, "unavailable") == {"detail": "the tracker of 'm' does not answer"}
    await supervisor.switch(away=False, knows_it=True)
    assert (await anext(messages))["event"] == "history"


async def test_the_events_of_a_replaced_tracker_are_its_own(
    trackers: TrackerGateway, address: str, tracker: Any
) -> None:
    messages = live(trackers, "m")
    await join(tracker, "a", "m-0")
    assert (await heard(messages, "event"))["replica"] == "m-0"
    await xo.destroy_actor(tracker)
    successor = await create_tracker(address)
    await join(successor, "b", "m-1")
    assert (await heard(messages, "event"))["replica"] == "m-1"


async def test_the_stream_ends_with_the_model(
    trackers: TrackerGateway, supervisor: Any, tracker: Any
) -> None:
    messages = live(trackers, "m")
    await heard(messages, "status")
    await xo.destroy_actor(tracker)
    await supervisor.switch(away=False, knows_it=False)
    assert await heard(messages, "gone") == {"detail": "model 'm' does not share its cache here"}
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def test_all_listeners_share_one_report(
    trackers: TrackerGateway, tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = trackers.report
    reads = []

    async def count(model_uid: str) -> dict[str, Any]:
        reads.append(model_uid)
        return await read(model_uid)

    monkeypatch.setattr(trackers, "report", count)
    monkeypatch.setattr(module, "STATUS_INTERVAL", 3600.0)
    for _ in range(5):
        await heard(live(trackers, "m"), "status")
    assert reads == ["m"]
    await trackers.shared_report("m", 0.0)
    assert reads == ["m", "m"]


async def test_only_so_many_listen_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTENERS", 2)
    listeners = Listeners()

    async def messages() -> AsyncIterator[dict[str, str]]:
        yield {}

    streams = [listeners.counted(messages()) for _ in range(2)]
    for stream in streams:
        listeners.check()
        assert await anext(stream) == {}
    with pytest.raises(HTTPException, match="2 streams are open"):
        listeners.check()
    await streams[0].aclose()  # type: ignore[attr-defined]
    listeners.check()

"""Streams go on when a server that is replaced has ended them."""

import json
from functools import partial
from typing import Any

import httpx
import pytest

from xinference_xavier.client import XavierClient
from xinference_xavier.client import client as module
from xinference_xavier.errors import ApiError
from xinference_xavier.stats.answers import SALT_HEADER

ENDPOINT = "http://xinference"


class Server:
    """Answers each request with the next of its streams, and then with 503."""

    def __init__(self) -> None:
        self.streams: list[str] = []
        self.asked: list[tuple[str, str | None]] = []
        self.accepted: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.raw_path.decode(), request.headers.get(SALT_HEADER)))
        self.accepted.append(request.headers["accept"])
        if not self.streams:
            return httpx.Response(503)
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, text=self.streams.pop(0), headers=headers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    server = Server()
    client = partial(httpx.Client, transport=httpx.MockTransport(server))
    monkeypatch.setattr(httpx, "Client", client)
    return server


def event(number: int) -> str:
    return message("event", {"event": "Sneezed", "time": number}, f"id: {number}\n")


def message(name: str, data: dict[str, Any], more: str = "") -> str:
    return f"event: {name}\n{more}data: {json.dumps(data)}\n\n"


STATUS = message("status", {"model_uid": "m", "enabled": True, "replicas": [], "totals": {}})
PREFIX: dict[str, Any] = {
    **{"name": "guide", "reason": "", "tokens": 0, "chunks": 0, "replicas": {}, "ttl": 1.0},
    **{"copies": 1, "retention": "soft", "created": 0.0, "used": 0.0, "expires": 1.0},
}
GONE = message("gone", {"detail": "the model has ended"})


def test_events_go_on_where_they_were(server: Server) -> None:
    server.streams = [event(1) + STATUS + event(2), event(1) + event(2) + event(3) + GONE]
    with XavierClient(ENDPOINT) as client:
        assert [each.time for each in client.events("m")] == [1, 2, 3]


def test_the_same_status_again_is_a_new_one(server: Server) -> None:
    server.streams = [event(1) + STATUS + STATUS, STATUS + GONE]
    with XavierClient(ENDPOINT) as client:
        assert [each.model_uid for each in client.watch("m")] == ["m"] * 3


def test_a_stream_changes_no_later_request(server: Server) -> None:
    """The library writes its own headers into those that it is given."""
    server.streams = [STATUS + GONE]
    with XavierClient(ENDPOINT) as client:
        assert len(list(client.watch("m"))) == 1
        with pytest.raises(ApiError):
            client.models()
    assert server.accepted == ["text/event-stream", "*/*"]


def test_a_stream_that_cannot_go_on_is_an_error(server: Server) -> None:
    server.streams = [STATUS]
    with XavierClient(ENDPOINT) as client:
        watching = client.watch("m")
        next(watching)
        with pytest.raises(ApiError):
            next(watching)


def test_progress_ends_when_nothing_is_left_to_do(server: Server) -> None:
    """The salt of the tenant is in no URL."""
    states = ("waiting", "computing", "kept")
    first, second, third = (message("prefix", {**PREFIX, "state": state}) for state in states)
    server.streams = [first, second + third]
    with XavierClient(ENDPOINT) as client:
        progress = client.watch_prefix("m", "guide", "a tenant")
        assert tuple(each.state for each in progress) == states
    assert server.asked == [("/v1/xavier/m/prefixes/guide/events", "a%20tenant")] * 2


def test_where_nobody_answers_there_is_no_status() -> None:
    with XavierClient("http://127.0.0.1:1") as client, pytest.raises(ApiError) as refused:
        client.models()
    assert refused.value.status is None

"""What changes is asked for again and again, and read where it has changed."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from xinference_xavier.client import XavierClient
from xinference_xavier.client import client as module
from xinference_xavier.errors import NOT_FOUND_HEADER, ApiError, UnknownPrefixError
from xinference_xavier.stats.answers import SALT_HEADER

STATUS = {"model_uid": "m", "enabled": True, "replicas": [], "totals": {}}
PREFIX: dict[str, Any] = {
    **{"name": "guide", "reason": "", "tokens": 0, "chunks": 0, "replicas": {}, "ttl": 1.0},
    **{"copies": 1, "retention": "soft", "created": 0.0, "used": 0.0, "expires": 1.0},
}


def gone(what: str) -> httpx.Response:
    return httpx.Response(404, json={"detail": "it is gone"}, headers={NOT_FOUND_HEADER: what})


def events(*times: int) -> httpx.Response:
    """Their numbers are their times."""
    found = [{"event": "Sneezed", "time": time} for time in times]
    return httpx.Response(200, json={"last": times[-1] if times else 2, "events": found})


class Server:
    """Gives the next of its answers to each request."""

    def __init__(self) -> None:
        self.answers: list[httpx.Response] = []
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.answers.pop(0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(module, "TICK", 0.0)
    server = Server()
    client = partial(httpx.Client, transport=httpx.MockTransport(server))
    monkeypatch.setattr(httpx, "Client", client)
    return server


@pytest.fixture
def client(server: Server) -> Iterator[XavierClient]:
    with XavierClient("http://xinference") as client:
        yield client


def test_each_event_comes_once_until_the_model_ends(server: Server, client: XavierClient) -> None:
    server.answers = [events(1, 2), events(), events(3), gone("model")]
    assert [each.time for each in client.events("m")] == [1, 2, 3]
    assert [dict(each.url.params) for each in server.asked] == [
        {"after": number} for number in ("0", "2", "2", "3")
    ]


def test_a_status_that_has_not_changed_is_not_sent_again(
    server: Server, client: XavierClient
) -> None:
    server.answers = [
        httpx.Response(200, json=STATUS, headers={"etag": '"1"'}),
        httpx.Response(304),
        httpx.Response(200, json=STATUS | {"enabled": False}, headers={"etag": '"2"'}),
        gone("model"),
    ]
    assert [each.enabled for each in client.watch("m")] == [True, True, False]
    asked = [each.headers.get("if-none-match") for each in server.asked]
    assert asked == [None, '"1"', '"1"', '"2"']


def test_a_server_that_does_not_answer_is_an_error(server: Server, client: XavierClient) -> None:
    server.answers = [httpx.Response(200, json=STATUS), httpx.Response(503)]
    watching = client.watch("m")
    next(watching)
    with pytest.raises(ApiError):
        next(watching)


def test_a_prefix_is_watched_until_nothing_is_left_to_do(
    server: Server, client: XavierClient
) -> None:
    """The salt of the tenant is in no URL."""
    states = ("waiting", "computing", "kept")
    server.answers = [httpx.Response(200, json={**PREFIX, "state": state}) for state in states]
    progress = client.watch_prefix("m", "guide", "a tenant")
    assert tuple(each.state for each in progress) == states
    for request in server.asked:
        assert request.url.raw_path == b"/v1/xavier/m/prefixes/guide"
        assert request.headers[SALT_HEADER] == "a%20tenant"


def test_a_prefix_that_is_removed_meanwhile_is_unknown(
    server: Server, client: XavierClient
) -> None:
    server.answers = [httpx.Response(200, json={**PREFIX, "state": "waiting"}), gone("prefix")]
    with pytest.raises(UnknownPrefixError):
        list(client.watch_prefix("m", "guide"))


def test_where_nobody_answers_there_is_no_status() -> None:
    with XavierClient("http://127.0.0.1:1") as client, pytest.raises(ApiError) as refused:
        client.models()
    assert refused.value.status is None

"""A client raises `ApiError` for each answer that it cannot read, and for names without a route."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import pytest

from xinference_xavier.client import XavierClient
from xinference_xavier.errors import ApiError, ModelNotFoundError, UnknownPrefixError

ENDPOINT = "http://xinference"
CALLS: dict[str, Callable[[Any], Any]] = {
    "models": lambda client: client.models(),
    "status": lambda client: client.status("m"),
    "switch": lambda client: client.switch("m", True),
    "set_routing": lambda client: client.set_routing("m", "off"),
    "set_weights_version": lambda client: client.set_weights_version("m", "1"),
    "flush": lambda client: client.flush("m"),
    "explain": lambda client: client.explain("m", "text"),
    "add_prefix": lambda client: client.add_prefix("m", "guide", "text"),
    "prefixes": lambda client: client.prefixes("m"),
    "prefix": lambda client: client.prefix("m", "guide"),
    "change_prefix": lambda client: client.change_prefix("m", "guide", ttl=1.0),
    "complete": lambda client: client.complete("m", "text", max_tokens=1),
    "cluster": lambda client: client.cluster(),
}
ITERATORS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "watch": lambda client: client.watch("m"),
    "events": lambda client: client.events("m"),
    "watch_prefix": lambda client: client.watch_prefix("m", "guide"),
}
OTHERS = ('"text"', "[[1]]", '{"models": 7}', '{"prefixes": [7]}', "[" * 100_000)
"""Answers of another server. Each call can read some of them."""


def answering(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=answer))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=transport))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_another_servers_answer_is_an_api_error_or_can_be_read(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    for answer in OTHERS:
        with monkeypatch.context() as patch:
            answering(patch, answer)
            with XavierClient(ENDPOINT) as client, suppress(ApiError):
                call(client)
    answering(monkeypatch, "7")
    with XavierClient(ENDPOINT) as client, pytest.raises(ApiError, match="the answer 7"):
        call(client)


@pytest.mark.parametrize("look", ITERATORS.values(), ids=ITERATORS)
def test_so_is_an_answer_of_many(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[Any], Iterator[Any]]
) -> None:
    for answer in ("7", '{"event": 7}', '{"last": 1, "events": [7]}'):
        with monkeypatch.context() as patch:
            answering(patch, answer)
            with XavierClient(ENDPOINT) as client, pytest.raises(ApiError, match="cannot be read"):
                next(look(client))


def test_explain_takes_one_question() -> None:
    with XavierClient("http://127.0.0.1:1") as client:
        for wrong in ({}, {"prompt": "1", "messages": []}):
            with pytest.raises(ValueError, match="either a prompt or messages"):
                client.explain("m", **wrong)


@pytest.mark.parametrize("name", ["a/b", ".", ".."])
def test_a_name_that_no_route_has_is_not_found(name: str) -> None:
    """Nobody is asked: clients and proxies make another path of it."""
    with XavierClient("http://127.0.0.1:1") as client:
        with pytest.raises(ModelNotFoundError):
            client.status(name)
        with pytest.raises(UnknownPrefixError):
            client.remove_prefix("m", name)

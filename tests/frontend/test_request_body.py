"""A body is passed on as it comes, and can be sent again as long as it is short."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from xinference_xavier.frontend import request_body as module
from xinference_xavier.frontend.request_body import ClientGoneError, RequestBody


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 10)


class Client:
    """Sends pieces of a body, and goes."""

    def __init__(self, *pieces: bytes, complete: bool = True) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, piece in enumerate(pieces, 1):
            more = not complete or number < len(pieces)
            self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        self._messages.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return await self._messages.get()


async def streamed(body: RequestBody) -> list[bytes]:
    return [piece async for piece in body.stream()]


async def test_a_short_body_can_be_read_and_sent_again() -> None:
    body = RequestBody(Client(b"one", b"two").receive)
    assert await body.read() == b"onetwo"
    for _ in range(2):
        assert await streamed(body) == [b"one", b"two"]
        assert body.again


async def test_a_body_that_nobody_read_is_kept_while_it_is_passed_on() -> None:
    body = RequestBody(Client(b"one", b"two").receive)
    passing = body.stream()
    assert await anext(passing) == b"one"
    assert await streamed(body) == [b"one", b"two"], "another server gets it from the beginning"


@pytest.mark.parametrize("read_before", [True, False])
async def test_a_long_body_is_passed_on_but_not_kept(read_before: bool) -> None:
    pieces = [b"x" * 6, b"y" * 6, b"z" * 6]
    body = RequestBody(Client(*pieces).receive)
    if read_before:
        assert await body.read() == b""
    assert body.again, "nothing of it has left"
    assert await streamed(body) == pieces
    assert not body.again
    assert body._kept == []


async def test_a_client_that_goes_in_the_middle_is_noticed() -> None:
    with pytest.raises(ClientGoneError):
        await RequestBody(Client(b"one", complete=False).receive).read()
    with pytest.raises(ClientGoneError):
        await streamed(RequestBody(Client(b"one", complete=False).receive))


async def test_a_client_that_goes_afterwards_is_noticed() -> None:
    body = RequestBody(Client(b"one").receive)
    gone = asyncio.create_task(body.client_gone())
    await asyncio.sleep(0)
    assert not gone.done(), "it leaves the body to its readers"
    await body.read()
    await gone


async def test_a_body_that_nobody_needs_is_not_sent_again() -> None:
    body = RequestBody(Client(b"one", b"two").receive)
    await anext(body.stream())
    body.abandon()
    assert not body.again
    await body.client_gone()
    complete = RequestBody(Client(b"one").receive)
    await complete.read()
    complete.abandon()
    assert complete.again

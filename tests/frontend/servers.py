"""HTTP servers on real sockets, in the test's own process and event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import Message, Receive, Scope, Send

HOST = "127.0.0.1"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The URL of `app`."""
    config = uvicorn.Config(app, log_level="critical", server_header=False, date_header=False)
    server = _Server(config)
    with socket.create_server((HOST, 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://{HOST}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task


def refusing() -> str:
    """A URL at which nobody listens."""
    with socket.create_server((HOST, 0)) as listening:
        return f"http://{HOST}:{listening.getsockname()[1]}"


@asynccontextmanager
async def mute() -> AsyncIterator[str]:
    """The URL of a server that closes each connection when a request arrives."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(close, HOST, 0) as server:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}"


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # nothing announces it
        await asyncio.sleep(0.001)


class Engine:
    """A server like a replica's. `does` says what it does with a request:

    answer  answers with its name and `status`
    stream  answers with the words that the test puts into `words`, until None
    hang    does not answer
    begin   sends the headers of an answer and closes the connection
    break   sends them and a word, and closes the connection
    """

    def __init__(self, name: str, does: str = "answer", status: int = 200) -> None:
        self.name = name
        self.does = does
        self.status = status
        self.sick = False
        self.encoding = ""
        self.asked: list[tuple[Scope, bytes]] = []
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        """Of the bodies, as they arrive."""
        self.words: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.arrived = asyncio.Event()
        """A request with its whole body."""
        self.left = asyncio.Event()
        """A client has gone before it had its answer."""

    @property
    def headers(self) -> dict[str, str]:
        """Of the latest request."""
        scope, _ = self.asked[-1]
        return {name.decode(): value.decode() for name, value in scope["headers"]}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await self._send(send, 503 if self.sick else 200, b"")
            return
        await self._read(scope, receive)
        await getattr(self, f"_{self.does}")(receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message["body"]
            self.chunks.put_nowait(message["body"])
            more = message.get("more_body", False)
        self.asked.append((scope, body))
        self.arrived.set()

    async def _send(self, send: Send, status: int, body: bytes) -> None:
        length = str(len(body)).encode()
        headers = [(b"content-length", length), (b"x-own", b"kept"), (b"server", b"engine")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, receive: Receive, send: Send) -> None:
        await self._send(send, self.status, self.name.encode())

    async def _hang(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    async def _begin(self, receive: Receive, send: Send) -> None:
        await send(self._start())

    async def _break(self, receive: Receive, send: Send) -> None:
        await send(self._start())
        await send({"type": "http.response.body", "body": b"word", "more_body": True})

    async def _stream(self, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(self._hang(receive, send))
        await send(self._start())
        while not self.left.is_set():
            next_word = asyncio.ensure_future(self.words.get())
            await asyncio.wait({next_word, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not next_word.done() or (word := next_word.result()) is None:
                next_word.cancel()
                break
            await send({"type": "http.response.body", "body": word, "more_body": True})
        leaving.cancel()
        await send({"type": "http.response.body"})

    def _start(self) -> Message:
        headers = [(b"content-type", b"text/event-stream")]
        if self.encoding:
            headers.append((b"content-encoding", self.encoding.encode()))
        return {"type": "http.response.start", "status": self.status, "headers": headers}

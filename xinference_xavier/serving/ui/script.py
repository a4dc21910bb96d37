"""Adds our script to xinference's own pages.

They are a finished export, so there is no place to register a switch or a menu entry: the script
adds both in the browser. Only whole, unencoded answers of type text/html that end a body are
changed; everything else, streams above all, passes through untouched and unbuffered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_END = b"</body>"
_CONDITIONS = (b"if-none-match", b"if-modified-since", b"range", b"if-range")


class ScriptInPages:
    """ASGI middleware: `source` is loaded by every HTML page but those below `except_below`."""

    def __init__(self, app: App, source: str, except_below: str) -> None:
        self._app = app
        self._tag = f'<script src="{source}" defer></script>'.encode()
        self._except_below = except_below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "GET"
            or f"{scope['path']}/".startswith(self._except_below)
            or "text/html" not in Headers(scope=scope).get("accept", "")
        ):
            await self._app(scope, receive, send)
            return
        # A browser that knows the page from before would be told that it has not changed.
        headers = [header for header in scope["headers"] if header[0] not in _CONDITIONS]
        # Nor may the server be handed a file's path in place of its bytes.
        extensions = {**scope.get("extensions", {})}
        extensions.pop("http.response.pathsend", None)
        page = _Page(send, self._tag)
        await self._app({**scope, "headers": headers, "extensions": extensions}, receive, page.send)


class _Page:
    """Holds an HTML answer back until it is whole, and sends it with the tag."""

    def __init__(self, send: Send, tag: bytes) -> None:
        self._send = send
        self._tag = tag
        self._start: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_whole_html(message):
            self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_page(self._start)

    async def _send_page(self, start: Message) -> None:
        position = self._body.rfind(_END)
        if position >= 0:
            self._body[position:position] = self._tag
            headers = MutableHeaders(raw=list(start["headers"]))
            headers["content-length"] = str(len(self._body))
            # They stand for the page without the tag.
            for name in ("etag", "last-modified", "accept-ranges"):
                if name in headers:
                    del headers[name]
            start = {**start, "headers": headers.raw}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": bytes(self._body)})


def _is_whole_html(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return (
        start["status"] in (200, 404)
        and headers.get("content-type", "").startswith("text/html")
        and "content-encoding" not in headers
    )

"""Adds our script to xinference's own pages.

The pages are a finished export without an extension point, so the script adds the switch and the
menu entry in the browser. Only complete, unencoded HTML answers are changed. Everything else, above
all streams, passes through unchanged and unbuffered.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_END = b"</body>"
_CONDITIONS = (b"if-none-match", b"if-modified-since", b"range", b"if-range")


class ScriptInPages:
    """ASGI middleware: every HTML page loads `source`, except those below `except_below`."""

    def __init__(self, app: ASGIApp, source: str, except_below: str) -> None:
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
        # A browser that cached the page without the script must not get "not modified".
        headers = [header for header in scope["headers"] if header[0] not in _CONDITIONS]
        page = _Page(send, self._tag)
        await self._app({**scope, "headers": headers}, receive, page.send)


class _Page:
    """Buffers an HTML answer until it is complete, and sends it with the tag."""

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
            # These describe the page without the tag.
            for name in ("etag", "last-modified", "accept-ranges"):
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

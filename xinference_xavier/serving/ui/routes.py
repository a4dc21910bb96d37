"""Serves our page and script, and adds the script to xinference's own pages.

xinference's pages are a finished export without an extension point, so the script adds the switch
and the menu entry in the browser. Only complete, unencoded HTML answers are changed. Everything
else, above all streams, passes through unchanged and unbuffered. Page and script hold no data, so
both are public, like xinference's own pages.
"""

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any, get_args

from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xinference_xavier._version import __version__
from xinference_xavier.config import UPSTREAM_OPTIONS, default_backend
from xinference_xavier.errors import ConfigError
from xinference_xavier.options import MAX_QUEUE, PARSERS, TRANSPORTS, Backend, Routing
from xinference_xavier.stats.schema import CHOICES, HIT_SOURCES, AnswerSeconds

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


logger = logging.getLogger(__name__)

PAGE_PATH = "/xavier/"
_SCRIPT_PATH = "/xavier/launch.js"
_FOLDER = Path(__file__).parent
# In this order: later files use what earlier ones define.
_PAGE_SCRIPTS = (
    *("words", "numbers", "dom", "api", "graph", "plots", "views", "state", "routing", "prefixes"),
    *("explain", "page"),
)
_ROUTINGS = get_args(Routing)
_DIALOG_SCRIPTS = ("words", "form", "switch", "menu")


def add_pages(context: Any) -> None:
    """`context` is xinference's APIExtensionContext."""

    async def get_page() -> HTMLResponse:
        return HTMLResponse(page(), headers={"cache-control": "no-cache"})

    async def get_script() -> Response:
        return Response(
            dialog_script(),
            media_type="text/javascript",
            headers={"cache-control": "max-age=31536000, immutable"},
        )

    # xinference's catch-all route would answer the path without the slash.
    for path in (PAGE_PATH, PAGE_PATH.rstrip("/")):
        context.router.add_api_route(path, get_page, include_in_schema=False)
    context.router.add_api_route(_SCRIPT_PATH, get_script, include_in_schema=False)
    digest = hashlib.sha256(dialog_script().encode()).hexdigest()[:16]
    context.app.add_middleware(
        ScriptInPages, source=f"{_SCRIPT_PATH}?{digest}", except_below=PAGE_PATH
    )


@functools.cache
def page() -> str:
    """The page as one document that loads nothing else."""
    scripts = _scripts(
        "page",
        _PAGE_SCRIPTS,
        HIT_SOURCES=HIT_SOURCES,
        ROUTINGS=_ROUTINGS,
        CHOICES=CHOICES,
        ANSWER_BOUNDS=AnswerSeconds.bounds,
    )
    document = _text("page/page.html").replace("/*version*/", __version__)
    return document.replace("/*style*/", _text("page/style.css")).replace("/*script*/", scripts)


@functools.cache
def dialog_script() -> str:
    """The switch and the menu entry, in a scope of their own within xinference's page."""
    scripts = _scripts(
        "dialog",
        _DIALOG_SCRIPTS,
        BACKENDS=get_args(Backend),
        DEFAULT_BACKEND=_default_backend(),
        OWN_OPTIONS=list(PARSERS),
        TRANSPORTS=list(TRANSPORTS),
        ROUTINGS=_ROUTINGS,
        MAX_QUEUE=MAX_QUEUE,
        UPSTREAM_OPTIONS=sorted(UPSTREAM_OPTIONS),
        PAGE_PATH=PAGE_PATH,
    )
    return f'"use strict";\n(() => {{\n{scripts}}})();\n'


def _default_backend() -> str:
    try:
        return default_backend()
    except ConfigError as error:  # which refuses the launch
        logger.warning("%s", error)
        return "extension"


def _scripts(folder: str, names: tuple[str, ...], **constants: object) -> str:
    """The files' text after definitions of `constants`."""
    lines = [f"const {name} = {json.dumps(value)};" for name, value in constants.items()]
    return "\n".join([*lines, *(_text(f"{folder}/{name}.js") for name in names)])


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")

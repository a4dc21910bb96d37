"""Serves our page and scripts, and adds a script to xinference's own pages.

xinference's pages are a finished export without an extension point, so the script adds the switch
and the menu entry in the browser. Only complete, unencoded HTML answers are changed. Everything
else, above all streams, passes through unchanged and unbuffered. Page and scripts hold no data, so
they are public, like xinference's own pages.
"""

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any, get_args

from fastapi import HTTPException
from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xinference_xavier._version import __version__
from xinference_xavier.config import UPSTREAM_OPTIONS, default_backend
from xinference_xavier.errors import ConfigError
from xinference_xavier.options import PARSERS, Backend, Routing
from xinference_xavier.stats.schema import CHOICES, HIT_SOURCES, AnswerSeconds

_END = b"</body>"
_CONDITIONS = (b"if-none-match", b"if-modified-since", b"range", b"if-range")


class ScriptInPages:
    """ASGI middleware: every HTML page loads `source`, except those below `except_below`."""

    def __init__(self, app: ASGIApp, source: str, except_below: str) -> None:
        self._app = app
        self._tag = f'<script type="module" src="{source}"></script>'.encode()
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
_FOLDER = Path(__file__).parent
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The page's Content-Security-Policy. xinference's menu links to the page and never frames it."""
_MEDIA_TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}


def add_pages(context: Any) -> None:
    """`context` is xinference's APIExtensionContext."""

    async def get_page() -> HTMLResponse:
        headers = {"cache-control": "no-cache", "content-security-policy": POLICY}
        return HTMLResponse(page(), headers=headers)

    async def get_file(digest: str, path: str) -> Response:
        if digest != _digest() or path not in files():
            raise HTTPException(404, f"no such file in version {__version__}: reload the page")
        return Response(
            files()[path],
            media_type=_MEDIA_TYPES[Path(path).suffix],
            headers={"cache-control": "max-age=31536000, immutable"},
        )

    # xinference's catch-all route would answer the path without the slash.
    for path in (PAGE_PATH, PAGE_PATH.rstrip("/")):
        context.router.add_api_route(path, get_page, include_in_schema=False)
    context.router.add_api_route(
        PAGE_PATH + "{digest}/{path:path}", get_file, include_in_schema=False
    )
    context.app.add_middleware(
        ScriptInPages, source=f"{_files_path()}/dialog/menu.js", except_below=PAGE_PATH
    )


@functools.cache
def page() -> str:
    """The document that loads everything else from `files`."""
    document = (_FOLDER / "page" / "page.html").read_text(encoding="utf-8")
    return document.replace("{version}", __version__).replace("{files}", _files_path())


@functools.cache
def files() -> dict[str, bytes]:
    """What the page and xinference's pages load, by path. Scripts import each other, so all of
    them have one digest: a browser never mixes versions."""
    found = {
        path.relative_to(_FOLDER).as_posix(): path.read_bytes()
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    }
    return found | {"constants.js": _constants().encode()}


def _files_path() -> str:
    return PAGE_PATH + _digest()


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path, content in files().items():
        digest.update(f"{path} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _constants() -> str:
    """A module of what the scripts share with the server; `constants.d.ts` declares it."""
    constants = {
        "LANGUAGES": languages(),
        "HIT_SOURCES": HIT_SOURCES,
        "ROUTINGS": get_args(Routing),
        "CHOICES": CHOICES,
        "ANSWER_BOUNDS": AnswerSeconds.bounds,
        "BACKENDS": get_args(Backend),
        "DEFAULT_BACKEND": _default_backend(),
        "OWN_OPTIONS": list(PARSERS),
        "UPSTREAM_OPTIONS": sorted(UPSTREAM_OPTIONS),
        "PAGE_PATH": PAGE_PATH,
    }
    return "".join(
        f"export const {name} = {json.dumps(value)};\n" for name, value in constants.items()
    )


def languages() -> dict[str, dict[str, Any]]:
    """The texts of page and launch dialog, by xinference's name of the language."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((_FOLDER / "languages").glob("*.json"))
    }


def _default_backend() -> str:
    try:
        return default_backend()
    except ConfigError as error:  # which refuses the launch
        logger.warning("%s", error)
        return "extension"

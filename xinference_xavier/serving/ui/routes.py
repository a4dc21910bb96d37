"""Serves the page and the dialog's script.

Neither holds data, so both are public, like xinference's own pages.
"""

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any, get_args

from fastapi.responses import HTMLResponse, Response

from xinference_xavier._version import __version__
from xinference_xavier.config import UPSTREAM_OPTIONS, default_backend
from xinference_xavier.errors import ConfigError
from xinference_xavier.options import MAX_QUEUE, PARSERS, TRANSPORTS, Backend, Routing
from xinference_xavier.serving.ui.script import ScriptInPages
from xinference_xavier.stats.routing import CHOICES
from xinference_xavier.stats.schema import HIT_SOURCES

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
        "page", _PAGE_SCRIPTS, HIT_SOURCES=HIT_SOURCES, ROUTINGS=_ROUTINGS, CHOICES=CHOICES
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

"""Our script is inserted into xinference's pages, and into nothing else. All that it and our page
load comes from here."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from tests.serving.ui.stage import Stage
from xinference_xavier.serving.ui.routes import ScriptInPages, files, page

HTML = {"accept": "text/html,application/xhtml+xml"}
TAG = '<script type="module" src="/s.js"></script>'
PAGE = "<html><body>é</body></html>"


def client_of(app: FastAPI) -> httpx.AsyncClient:
    app.add_middleware(ScriptInPages, source="/s.js", except_below="/ours/")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ui")


async def answer_to(
    answer: Response, path: str = "/", headers: dict[str, str] = HTML, method: str = "GET"
) -> httpx.Response:
    app = FastAPI()

    async def give() -> Response:
        return answer

    app.add_api_route(path, give, methods=["GET", "HEAD"])
    async with client_of(app) as client:
        return await client.request(method, path, headers=headers)


async def test_a_page_gets_the_script_at_its_end() -> None:
    headers = {"etag": '"1"', "cache-control": "no-cache"}
    given = await answer_to(HTMLResponse(PAGE, headers=headers))
    assert given.text == PAGE.replace("</body>", f"{TAG}</body>")
    assert int(given.headers["content-length"]) == len(given.content)
    assert "etag" not in given.headers
    assert given.headers["cache-control"] == "no-cache"


async def test_a_browser_with_the_page_in_its_cache_gets_it_again() -> None:
    """Otherwise it would lack the switch until somebody empties its cache."""
    app = FastAPI()
    asked: list[Any] = []

    async def give(request: Request) -> Response:
        asked.append(dict(request.headers))
        return HTMLResponse(PAGE)

    app.add_api_route("/", give)
    async with client_of(app) as client:
        conditions = {"if-none-match": '"1"', "if-modified-since": "now", "range": "bytes=0-1"}
        assert TAG in (await client.get("/", headers=HTML | conditions)).text
    assert not conditions.keys() & asked[0].keys()


@pytest.mark.parametrize(
    ("answer", "path", "headers", "method"),
    [
        (JSONResponse({"text": PAGE}), "/", HTML, "GET"),
        (HTMLResponse(PAGE), "/", {"accept": "*/*"}, "GET"),
        (HTMLResponse(PAGE), "/", HTML, "HEAD"),
        (HTMLResponse(PAGE), "/ours/", HTML, "GET"),
        (HTMLResponse(PAGE, status_code=500), "/", HTML, "GET"),
        (HTMLResponse("no body ends here"), "/", HTML, "GET"),
        (HTMLResponse(PAGE, headers={"content-encoding": "unheard-of"}), "/", HTML, "GET"),
    ],
)
async def test_everything_else_passes_untouched(
    answer: Response, path: str, headers: dict[str, str], method: str
) -> None:
    body = b"" if method == "HEAD" else bytes(answer.body)
    given = await answer_to(answer, path, headers, method)
    assert given.content == body
    assert given.headers["content-length"] == str(len(answer.body))


async def test_streams_are_not_delayed() -> None:
    """The answer to a request for a page may be a stream."""
    sent: list[Any] = []
    go_on = asyncio.Event()

    async def stream() -> AsyncIterator[str]:
        yield "first"
        await go_on.wait()
        yield "last"

    app = FastAPI()

    async def give() -> StreamingResponse:
        return StreamingResponse(stream(), media_type="text/event-stream")

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body") == b"first":
            go_on.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    app.add_api_route("/", give)
    middleware = ScriptInPages(app, source="/s.js", except_below="/ours/")
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [(b"accept", b"text/html")],
    }
    async with asyncio.timeout(10):
        await middleware(scope, receive, send)
    assert b"".join(message.get("body", b"") for message in sent) == b"firstlast"


async def test_xinferences_own_pages_get_it_and_can_load_it(stage: Stage) -> None:
    async with httpx.AsyncClient(base_url=stage.plain_address) as client:
        for path in ("/", "/launch-model/llm", "/login", "/no/such/page"):
            text = (await client.get(path, headers=HTML)).text
            assert text.count('<script type="module" src="/xavier/') == 1, path
        source = text.rpartition('<script type="module" src="')[2].partition('"')[0]
        found = await client.get(source)
        assert found.headers["content-type"].startswith("text/javascript")
        assert found.content == files()["dialog/menu.js"]
        for path in ("/xavier", "/xavier/"):
            assert (await client.get(path, headers=HTML)).text == page()


async def test_everything_that_a_page_loads_is_here_and_of_one_version(stage: Stage) -> None:
    """A browser keeps it for ever: another version has other addresses."""
    waiting = re.findall(r'(?:src|href)="([^"]+)"', page())
    async with httpx.AsyncClient(base_url=stage.plain_address) as client:
        folder, name = waiting[-1].split("/page/")
        waiting.append(f"{folder}/dialog/menu.js")
        loaded: dict[str, str] = {}
        for address in waiting:
            answer = await client.get(address)
            assert answer.status_code == 200, address
            assert "immutable" in answer.headers["cache-control"]
            loaded[address] = answer.text
            imports = re.findall(r'(?:^import [^;]*? from |new URL\()"([^"]+)"', answer.text, re.M)
            joined = [str(httpx.URL(f"http://x{address}").join(each).path) for each in imports]
            waiting += [each for each in joined if each not in waiting]
        assert {address.removeprefix(f"{folder}/") for address in loaded} == files().keys()
        for gone in (f"/xavier/0000/page/{name}", f"{folder}/page/none.js", f"{folder}/routes.py"):
            refused = await client.get(gone)
            assert (refused.status_code, "reload the page" in refused.text) == (404, True), gone


async def test_the_page_loads_and_asks_only_its_own_server(stage: Stage) -> None:
    """xinference's own pages keep the policy that they have."""
    async with httpx.AsyncClient(base_url=stage.plain_address) as client:
        for path in ("/xavier", "/xavier/"):
            policy = (await client.get(path, headers=HTML)).headers["content-security-policy"]
            allowed = dict(directive.split(" ", 1) for directive in policy.split("; "))
            assert allowed.pop("default-src") == "'none'"
            loads = {"script-src", "style-src", "connect-src", "img-src"}
            assert {name: allowed.pop(name) for name in loads} == dict.fromkeys(loads, "'self'")
            nothing = ("base-uri", "form-action", "frame-ancestors")
            assert allowed == dict.fromkeys(nothing, "'none'")
        for path in ("/", "/login", "/v1/models"):
            answer = await client.get(path, headers=HTML)
            assert "content-security-policy" not in answer.headers, path


@pytest.mark.parametrize("path", [path for path in files() if not path.endswith(".svg")])
def test_nothing_is_loaded_from_elsewhere(path: str) -> None:
    text = files()[path].decode()
    for outside in ("@import", "url(http", 'href="http', '"//', ' from "http'):
        assert outside not in text, outside

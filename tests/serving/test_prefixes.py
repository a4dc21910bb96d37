"""Named prefixes in the API process: their REST routes, with a store and a keeper, and what other
requests and replicas get of them. The cluster is a model of one."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import HTTPException, Request
from xinference import extensions

from tests.frontend.test_keeper import MODEL, Cluster
from tests.serving.supervisors import api_context, gateway_to
from xinference_xavier.client.client import _tenant
from xinference_xavier.frontend.prefix import NewPrefix, Terms
from xinference_xavier.serving import prefixes as module
from xinference_xavier.serving.prefixes import (
    FILE,
    Prefixes,
    Starting,
    add_prefix_routes,
)
from xinference_xavier.stats.answers import SALT_HEADER

PATH = f"/v1/xavier/{MODEL}/prefixes"
GUIDE = {"name": "travel guide", "prompt": "text"}
STORED = NewPrefix("guide", "", {"prompt": "text"}, Terms())


class Model:
    """The model actor of every replica."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def generate(self, prompt: str, config: Any, **how: Any) -> None:
        self.asked.append(("generate", prompt, config, how))

    async def chat(self, messages: Any, config: Any, **how: Any) -> None:
        self.asked.append(("chat", messages, config, how))


class Named(Prefixes):
    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.model = Model()
        super().__init__(gateway_to(self), home)
        self.keeper._call, self.keeper._ask = cluster.call, cluster.ask
        self.keeper._loads = cluster.loads

    async def get_model(self, name: str, xavier_replica: bool = False) -> Model:
        """The supervisor's method."""
        assert (name, xavier_replica) == ("m-0", True)
        return self.model


def access(request: Request, model_uid: str) -> None:
    if "forbidden" in request.headers:
        raise HTTPException(403, "not you")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("m-0", "m-1")


@pytest.fixture
async def prefixes(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Named]:
    prefixes = Named(cluster, tmp_path)
    yield prefixes
    await prefixes.close()


@pytest.fixture
async def started(prefixes: Named) -> Named:
    await prefixes.start()
    return prefixes


@pytest.fixture
async def client(
    started: Named, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(module, "model_access", lambda context: access)
    context = api_context()
    add_prefix_routes(context, started)
    context.app.include_router(context.router)
    transport = httpx.ASGITransport(context.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield client


async def names(client: httpx.AsyncClient, salt: str | None = None) -> list[str]:
    answer = await client.get(PATH, headers={} if salt is None else {SALT_HEADER: salt})
    return [each["name"] for each in answer.json()["prefixes"]]


async def test_a_prefix_is_added_shown_changed_and_removed(client: httpx.AsyncClient) -> None:
    added = await client.post(PATH, json=GUIDE)
    assert (added.status_code, added.json()["state"]) == (201, "waiting")
    shown = await client.get(f"{PATH}/travel%20guide")
    assert (shown.status_code, shown.json()["name"]) == (200, "travel guide")
    changed = await client.patch(f"{PATH}/travel%20guide", json={"ttl": "7d", "copies": "all"})
    assert (changed.status_code, changed.json()["ttl"]) == (200, 7 * 86400)
    assert await names(client) == ["travel guide"]
    assert (await client.delete(f"{PATH}/travel%20guide")).json() == {"removed": "travel guide"}
    assert await names(client) == []


async def test_no_tenant_sees_another_s_names(client: httpx.AsyncClient) -> None:
    await client.post(PATH, json={**GUIDE, "cache_salt": "a"})
    assert await names(client) == await names(client, "b") == []
    assert await names(client, "a") == ["travel guide"]
    assert (await client.get(f"{PATH}/travel%20guide")).status_code == 404


async def test_a_salt_in_a_url_is_refused(client: httpx.AsyncClient) -> None:
    """A client that sent it there would see the names of no tenant."""
    answer = await client.get(f"{PATH}?cache_salt=a")
    assert (answer.status_code, SALT_HEADER in answer.text) == (400, True)


@pytest.mark.parametrize("salt", [" a ", "a+b/c==", "100%41", "手册", "x" * 256])
async def test_a_salt_of_any_text_fits_into_the_header(
    client: httpx.AsyncClient, salt: str
) -> None:
    answer = await client.post(PATH, json={**GUIDE, "cache_salt": salt})
    assert answer.status_code == 201, answer.text
    assert await names(client, _tenant(salt)[SALT_HEADER]) == ["travel guide"]


async def test_prefixes_are_of_the_salt_that_an_extension_supplies(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that claims another one sees and changes nothing of it."""

    def supply(request: Request) -> SimpleNamespace:
        return SimpleNamespace(value=request.headers["x-key"])

    await client.post(PATH, json={**GUIDE, "cache_salt": "alice"})
    monkeypatch.setattr(extensions, "resolve_cache_salt", supply, raising=False)
    claim = {"x-key": "mallory", SALT_HEADER: "alice"}
    path = f"{PATH}/travel%20guide"
    assert (await client.get(PATH, headers=claim)).json() == {"prefixes": []}
    for method in ("GET", "PATCH", "DELETE"):
        assert (await client.request(method, path, json={}, headers=claim)).status_code == 404
    added = await client.post(PATH, json={**GUIDE, "cache_salt": "alice"}, headers=claim)
    assert added.status_code == 201
    assert (await client.delete(path, headers=claim)).status_code == 200
    assert (await client.get(path, headers={"x-key": "alice"})).status_code == 200


async def test_without_the_supplied_salt_there_is_no_answer(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: Request) -> None:
        raise RuntimeError("the password is 1234")

    monkeypatch.setattr(extensions, "resolve_cache_salt", fail, raising=False)
    answer = await client.get(PATH)
    assert (answer.status_code, "1234" in answer.text) == (500, False)


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
async def test_unknown_names(client: httpx.AsyncClient, method: str) -> None:
    await client.post(PATH, json=GUIDE)
    answer = await client.request(method, f"{PATH}/travel", json={})
    assert answer.status_code == 404
    assert answer.headers["x-xavier-not-found"] == "prefix"
    assert "has no prefix named 'travel'; did you mean 'travel guide'?" in answer.text


async def test_a_model_that_does_not_share(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/xavier/other/prefixes", json=GUIDE)
    assert (answer.status_code, answer.headers["x-xavier-not-found"]) == (404, "model")


async def test_wrong_requests(client: httpx.AsyncClient, cluster: Cluster) -> None:
    answer = await client.post(PATH, json={**GUIDE, "name": "a/b"})
    assert (answer.status_code, "choose another" in answer.text) == (400, True)
    for wrong in ("", "%ff", "%00", "x" * 257):
        assert (await client.get(PATH, headers={SALT_HEADER: wrong})).status_code == 400
    cluster.tokens = 5
    answer = await client.post(PATH, json=GUIDE)
    assert (answer.status_code, "give a prefix of at least 128" in answer.text) == (400, True)
    assert await names(client) == []


def broken(*_: object) -> Any:
    raise sqlite3.OperationalError("disk I/O error")


async def test_a_file_that_cannot_be_written(
    started: Named, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.post(PATH, json=GUIDE)
    for method in ("_add", "_delete"):
        monkeypatch.setattr(started.names._store, method, broken)
    for answer in (
        await client.post(PATH, json=GUIDE),
        await client.delete(f"{PATH}/travel%20guide"),
    ):
        assert answer.status_code == 503
        assert "the names of prefixes cannot be changed: disk I/O error" in answer.text
    assert await names(client) == ["travel guide"]


async def test_only_those_who_may_ask_the_model(client: httpx.AsyncClient) -> None:
    await client.post(PATH, json=GUIDE)
    forbidden = {"forbidden": "1"}
    for method, path in (("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/travel%20guide")):
        answer = await client.request(method, path, json=GUIDE, headers=forbidden)
        assert answer.status_code == 403
    assert await names(client) == ["travel guide"]


# -- for requests and replicas ----------------------------------------------------------------


async def test_they_are_kept_with_the_server_s_start(cluster: Cluster, tmp_path: Path) -> None:
    prefixes, reached = Named(cluster, tmp_path), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append((scope["type"], prefixes.names.failure))

    starting = Starting(app, prefixes)
    await starting({"type": "http"}, None, None)  # type: ignore[arg-type]
    await starting({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert reached == [("http", "the server starts; ask again"), ("lifespan", "")]
    assert (tmp_path / FILE).exists()
    assert prefixes.names.failure == "the server ends"
    assert [each.name for each in (tmp_path / FILE).parent.iterdir()] == [FILE.name], "closed"


async def test_a_file_that_cannot_be_opened_leaves_the_server_alone_and_is_tried_again(
    prefixes: Named, tmp_path: Path
) -> None:
    (tmp_path / FILE).mkdir(parents=True)
    await prefixes.start()
    with pytest.raises(HTTPException) as refused:
        await prefixes.content_of(MODEL, "", "guide")
    assert refused.value.status_code == 503
    assert "the names of prefixes cannot be read" in refused.value.detail
    status = prefixes.status(MODEL)
    assert (status["prefixes"], status["prefix_states"]) == ([], {})
    (tmp_path / FILE).rmdir()
    await prefixes.names.tend()
    await prefixes.names.add(MODEL, STORED)
    assert await prefixes.content_of(MODEL, "", "guide") == STORED.content


async def test_only_names_without_a_tenant_are_public(started: Named, cluster: Cluster) -> None:
    cluster.replicas.clear()
    await started.names.add(MODEL, STORED)
    await started.names.add(MODEL, STORED._replace(name="secret", tenant="a"))
    status = started.status(MODEL)
    assert [each["name"] for each in status["prefixes"]] == ["guide"]
    async with asyncio.timeout(30):
        while status["prefix_states"] != {"waiting": 2}:
            await asyncio.sleep(0)
            status = started.status(MODEL)


async def test_a_request_gets_a_name_s_content(started: Named) -> None:
    await started.names.add(MODEL, STORED)
    assert await started.content_of(MODEL, "", "guide") == STORED.content
    with pytest.raises(HTTPException, match=r"404: .* has no prefix named 'guide'"):
        await started.content_of(MODEL, "b", "guide")


async def test_the_status_shows_those_that_were_used_last(
    started: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHOWN", 2)
    for name in "abcd":
        await started.names.add(MODEL, STORED._replace(name=name))
    await started.content_of(MODEL, "", "b")
    assert [each["name"] for each in started.status(MODEL)["prefixes"]] == ["b", "d"]


async def test_while_names_cannot_be_read_a_request_is_told_so(
    prefixes: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HTTPException, match="503: the server starts"):
        await prefixes.content_of(MODEL, "", "guide")
    await prefixes.start()
    await prefixes.names.add(MODEL, STORED)
    with monkeypatch.context() as patch:
        patch.setattr(prefixes.names._store, "_version", broken)
        with pytest.raises(HTTPException, match="503: the names of prefixes cannot be read: disk"):
            await prefixes.content_of(MODEL, "", "guide")
    assert await prefixes.content_of(MODEL, "", "guide") == STORED.content


@pytest.mark.parametrize(
    ("content", "tenant", "asked"),
    [
        ({"prompt": "text"}, "", ("generate", "text", {"max_tokens": 1})),
        ({"messages": [1]}, "a", ("chat", [1], {"max_tokens": 1, "cache_salt": "a"})),
        ({"messages": [1], "tools": [2]}, "", ("chat", [1], {"max_tokens": 1, "tools": [2]})),
        (
            {"prompt": "text", "lora_name": "poet"},
            "",
            ("generate", "text", {"max_tokens": 1, "lora_name": "poet"}),
        ),
    ],
)
async def test_a_replica_is_asked_for_one_token(
    started: Named, content: Any, tenant: str, asked: Any
) -> None:
    await started._ask(MODEL, "m-0", content, tenant, "number 1")
    assert started.model.asked == [(*asked, {"request_id": "number 1"})]

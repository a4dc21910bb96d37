"""Named prefixes in the API process: their REST routes, and what other requests get of them. The
tracker is real, and its only replica is the test's."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import xoscar as xo
from fastapi import HTTPException, Request
from xinference import extensions

from tests.harness.remote import PATIENCE
from tests.serving.supervisors import api_context, gateway_to, join
from tests.tracker_pools import create_tracker
from xinference_xavier.client.client import _tenant
from xinference_xavier.errors import NamesError
from xinference_xavier.protocol.prefixes import Kept
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.serving import prefix_routes as module
from xinference_xavier.serving.prefix_routes import Prefixes, add_prefix_routes
from xinference_xavier.stats.answers import SALT_HEADER

MODEL = "m"
PATH = f"/v1/xavier/{MODEL}/prefixes"
GUIDE = {"name": "travel guide", "prompt": "text"}


class Replica(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The part of a replica's actor that the tracker calls. A text has a token per letter."""

    async def explain(self, packed: bytes) -> dict[str, Any]:
        tokens = len(json.loads(packed)["prompt"])
        return {"prompt_tokens": tokens, "context_tokens": 64, "chunk_tokens": 4, "chunks": []}

    async def keep(self, changes: Any) -> Kept:
        return Kept({}, 4, 0)


async def make_tracker(address: str, home: Path) -> Any:
    tracker = await create_tracker(address, MODEL, home=home)
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await tracker.prefixes("")
            except NamesError:  # it reads the file
                await asyncio.sleep(0)
            else:
                return tracker


@pytest.fixture
async def tracker(supervisor: Any, address: str, tmp_path: Path) -> AsyncIterator[Any]:
    tracker = await make_tracker(address, tmp_path)
    await xo.create_actor(Replica, address=address, uid=replica_uid("a"))
    await join(tracker, "a", "m-rep0", address)
    yield tracker
    with suppress(xo.ActorNotExist):  # a test did so
        await xo.destroy_actor(tracker)


@pytest.fixture
async def client(tracker: Any, supervisor: Any) -> AsyncIterator[httpx.AsyncClient]:
    context = api_context()
    add_prefix_routes(context, gateway_to(supervisor))
    context.app.include_router(context.router)
    transport = httpx.ASGITransport(context.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield client


async def names(client: httpx.AsyncClient, salt: str | None = None) -> list[str]:
    answer = await client.get(PATH, headers={} if salt is None else {SALT_HEADER: salt})
    return [each["name"] for each in answer.json()["prefixes"]]


async def test_a_prefix_is_added_shown_changed_and_removed(client: httpx.AsyncClient) -> None:
    added = await client.post(PATH, json={**GUIDE, "ttl": "2h"})
    assert (added.status_code, added.json()["state"]) == (201, "waiting")
    shown = await client.get(f"{PATH}/travel%20guide")
    assert (shown.status_code, shown.json()["name"]) == (200, "travel guide")
    changed = await client.patch(f"{PATH}/travel%20guide", json={"copies": "all"})
    assert (changed.status_code, changed.json()["copies"]) == (200, "all")
    assert changed.json()["ttl"] == 7200.0, "what is missing stays"
    assert changed.json()["created"] == added.json()["created"]
    assert await names(client) == ["travel guide"]
    assert (await client.delete(f"{PATH}/travel%20guide")).json() == {"removed": "travel guide"}
    assert await names(client) == []


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


async def test_wrong_requests(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={**GUIDE, "name": "a/b"})
    assert (answer.status_code, "choose another" in answer.text) == (400, True)
    for wrong in ("", "%ff", "%00", "x" * 257):
        assert (await client.get(PATH, headers={SALT_HEADER: wrong})).status_code == 400
    answer = await client.post(PATH, json={**GUIDE, "prompt": "?"})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("'travel guide' has 1 tokens; give a prefix of")
    assert await names(client) == []


def full(*args: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_file_that_cannot_be_written(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.post(PATH, json=GUIDE)
    monkeypatch.setattr(os, "fsync", full)
    for answer in (
        await client.post(PATH, json=GUIDE),
        await client.delete(f"{PATH}/travel%20guide"),
    ):
        assert answer.status_code == 503
        assert answer.json()["detail"].startswith("the names of prefixes cannot be changed: [Errno")
    assert await names(client) == ["travel guide"]


# -- for requests ------------------------------------------------------------------------------


@pytest.fixture
def prefixes(supervisor: Any) -> Prefixes:
    return Prefixes(gateway_to(supervisor))


async def refusal(prefixes: Prefixes, name: str = "travel guide", tenant: str = "") -> Any:
    with pytest.raises(HTTPException) as refused:
        await prefixes.content_of(MODEL, tenant, name)
    return refused.value


async def test_a_content_is_sent_once_to_each_process(
    client: httpx.AsyncClient, prefixes: Prefixes, tracker: Any, supervisor: Any
) -> None:
    """And never an old one: a name means the same in all of them."""
    other = Prefixes(gateway_to(supervisor))
    for text in ("text", "another text"):
        await client.post(PATH, json={**GUIDE, "prompt": text})
        for each in (prefixes, other):
            first = await each.content_of(MODEL, "", "travel guide")
            assert first == {"prompt": text}
            assert await each.content_of(MODEL, "", "travel guide") is first
    await client.delete(f"{PATH}/travel%20guide")
    for each in (prefixes, other):
        assert (await refusal(each)).status_code == 404
        assert not each._remembered


async def test_contents_are_remembered_as_far_as_there_is_room(
    client: httpx.AsyncClient, supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 60)
    prefixes = Prefixes(gateway_to(supervisor))
    for name in ("a", "b", "c"):
        await client.post(PATH, json={"name": name, "prompt": "x" * 10})
        await prefixes.content_of(MODEL, "", name)
    assert [name for *_, name in prefixes._remembered] == ["b", "c"]


async def test_what_was_used_is_served_while_the_tracker_is_away(
    client: httpx.AsyncClient, prefixes: Prefixes, tracker: Any, address: str, tmp_path: Path
) -> None:
    """The supervisor is started again; then the names are those of the file."""
    for name in ("travel guide", "other", "removed"):
        await client.post(PATH, json={**GUIDE, "name": name})
    for name in ("travel guide", "removed"):
        await prefixes.content_of(MODEL, "", name)
    await client.delete(f"{PATH}/removed")
    await xo.destroy_actor(tracker)
    assert await prefixes.content_of(MODEL, "", "travel guide") == {"prompt": "text"}
    unknown = await refusal(prefixes, "other")
    assert (unknown.status_code, unknown.headers) == (404, {"x-xavier-not-found": "model"})
    successor = await make_tracker(address, tmp_path)
    assert await prefixes.content_of(MODEL, "", "other") == {"prompt": "text"}
    assert (await refusal(prefixes, "removed")).status_code == 404
    await xo.destroy_actor(successor)


async def test_while_names_cannot_be_read_a_request_is_told_so(
    prefixes: Prefixes, supervisor: Any, address: str, tmp_path: Path
) -> None:
    (tmp_path / "names" / "m.json").mkdir(parents=True)
    tracker = await create_tracker(address, MODEL, home=tmp_path)
    refused = await refusal(prefixes)
    assert refused.status_code == 503
    assert refused.detail.startswith("the names of prefixes cannot be read: ")
    await xo.destroy_actor(tracker)

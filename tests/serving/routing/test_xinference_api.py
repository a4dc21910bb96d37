"""The text routes are xinference's own, whatever their paths, and so are their tenants. The router
learns what a request asks as xinference has read it."""

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest
from fastapi.routing import APIRoute
from xinference import extensions

from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES, body_of
from tests.serving.text_api import TextApi, Told, llm_router, no_prefixes
from xinference_xavier.frontend.question import MAX_TEXT, prompt_text
from xinference_xavier.serving.routing import remember_texts
from xinference_xavier.serving.seam import TEXT_ENDPOINTS

WITHOUT_A_TEXT = {
    "count_anthropic_tokens",
    "anthropic_list_models",
    "anthropic_get_model",
    "create_flexible_infer",
}
PATHS = (*TEXT_ROUTES, "/anthropic/v1/messages")


async def contracts(model_uid: str, tenant: str, name: str) -> Any:
    """The contract of each tenant."""
    if name != "contract":
        return await no_prefixes(model_uid, tenant, name)
    if tenant == "":
        return {"messages": [{"role": "user", "content": "everybody's contract"}]}
    return {"prompt": f"{tenant}'s contract"}


@pytest.fixture
async def text_api(start_text_api: Callable[..., Awaitable[TextApi]]) -> TextApi:
    return await start_text_api(contracts)


@pytest.fixture
def tenant(monkeypatch: pytest.MonkeyPatch) -> str:
    """The tenant of a request with the key "mallory" and the salt "alice", where an extension
    supplies the salts."""

    class Tenants:
        name, api_version = "tenants", 1

        def cache_salt(self, request: Any) -> Any:
            return extensions.CacheSalt(request.headers["x-key"])

    module = ModuleType("tenants_of_a_test")
    module.extension = Tenants  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("XINFERENCE_EXTENSIONS", f"{module.__name__}:extension")
    return "mallory"


def test_every_route_of_an_llm_is_known() -> None:
    """One more in xinference's router is a text route or is named here."""
    router = llm_router()
    endpoints = {each.endpoint.__name__ for each in router.routes if isinstance(each, APIRoute)}
    assert endpoints - WITHOUT_A_TEXT == TEXT_ENDPOINTS
    assert remember_texts(router) == TEXT_ENDPOINTS


def test_the_paths_of_text_routes_are_tested() -> None:
    routes = [each for each in llm_router().routes if isinstance(each, APIRoute)]
    assert {each.path for each in routes if each.endpoint.__name__ in TEXT_ENDPOINTS} == {*PATHS}


@pytest.mark.parametrize("path", PATHS)
async def test_every_text_route_knows_names(text_api: TextApi, path: str) -> None:
    unknown = await text_api.ask(path, prefix_name="another")
    assert (unknown.status_code, unknown.headers["x-xavier-not-found"]) == (404, "prefix")
    assert (await text_api.ask(path, prefix_name=7)).status_code == 400
    assert not await text_api.asked()


@pytest.mark.parametrize("path", PATHS[1:])
async def test_every_route_of_chats_begins_with_what_is_named(text_api: TextApi, path: str) -> None:
    assert (await text_api.ask(path, prefix_name="contract")).status_code == 200
    (asked,) = await text_api.asked()
    assert [each["content"] for each in asked.content] == ["everybody's contract", ANY]


async def test_a_tenants_prefix_is_of_the_salt_that_an_extension_supplies(
    text_api: TextApi, tenant: str
) -> None:
    answer = await text_api.ask(
        COMPLETIONS, headers={"x-key": "mallory"}, prefix_name="contract", cache_salt="alice"
    )
    assert answer.status_code == 200, answer.text
    (asked,) = await text_api.asked()
    assert asked.content == f"{tenant}'s contracthi"


@pytest.mark.parametrize("by", ["header", "body"])
async def test_a_long_body_keeps_its_prefix_and_its_tenant(text_api: TextApi, by: str) -> None:
    long = "x" * (MAX_TEXT + 1)
    headers = {"x-xavier-prefix": "contract"} if by == "header" else {}
    named = {"prefix_name": "contract"} if by == "body" else {}
    answer = await text_api.ask(COMPLETIONS, long, headers, cache_salt="alice", **named)
    assert answer.status_code == 200, answer.text
    (asked,) = await text_api.asked()
    assert asked.content == f"alice's contract{long}"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
async def test_what_the_router_hashes_is_of_the_supplied_salt(
    text_api: TextApi, told: list[Told], tenant: str, path: str
) -> None:
    more = {"instructions": "many words " * 100}
    answer = await text_api.ask(path, headers={"x-key": "mallory"}, cache_salt="alice", **more)
    assert answer.status_code == 200, answer.text
    body = body_of(path, "m", "hi", **more, cache_salt=tenant)
    if path == "/v1/responses":
        system = {"role": "system", "content": body["instructions"]}
        body = {"messages": [system, {"role": "user", "content": "hi"}], "cache_salt": tenant}
    assert [each.text for each in told] == [prompt_text(body)]


@pytest.mark.parametrize(
    ("length", "hashed"),
    [(3000, 3007), (300_000, 300_007), (MAX_TEXT, 0)],
    ids=["short", "read aside", "too long to be hashed"],
)
async def test_a_body_is_put_together_from_its_parts(
    text_api: TextApi, told: list[Told], length: int, hashed: int
) -> None:
    body = {"model": "m", "prompt": "x" * length, "prompt_cache_key": "chat"}

    async def parts() -> AsyncIterator[bytes]:
        whole = json.dumps(body).encode()
        yield whole[:1000]
        yield whole[1000:]

    headers = {"content-type": "application/json"}
    answer = await text_api.client.post(COMPLETIONS, content=parts(), headers=headers)
    assert answer.status_code == 200, answer.text
    assert [(each.text.length, each.session) for each in told] == [(hashed, "chat")]


async def test_a_named_text_is_part_of_what_is_hashed(text_api: TextApi, told: list[Told]) -> None:
    await text_api.ask(COMPLETIONS, "x" * 3000, prefix_name="contract", cache_salt="alice")
    whole = {"prompt": "alice's contract" + "x" * 3000, "cache_salt": "alice"}
    assert [each.text for each in told] == [prompt_text(whole)]


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("手册", "手册".encode()),
        ("café", "café".encode()),
        ("café", "café".encode("latin-1")),
    ],
)
async def test_a_name_in_a_header_is_in_utf_8_or_latin_1(
    text_api: TextApi, name: str, sent: bytes
) -> None:
    answer = await text_api.client.post(
        COMPLETIONS, json=body_of(COMPLETIONS, "m", "hi"), headers=[(b"x-xavier-prefix", sent)]
    )
    assert answer.status_code == 404
    assert f"no prefix named {name!r}" in answer.text

"""The text routes are xinference's own, whatever their paths, and so are their tenants."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest
from fastapi.routing import APIRoute
from xinference import extensions

from tests.serving.routing.test_install import Prefixes
from tests.serving.routing.xinference_api import BODIES, XinferenceApi, llm_router
from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend.asked import prompt_text
from xinference_xavier.serving.routing.middleware import TEXT_ENDPOINTS, remember_texts

WITHOUT_A_TEXT = {
    "count_anthropic_tokens",
    "anthropic_list_models",
    "anthropic_get_model",
    "create_flexible_infer",
}
ANTHROPIC = "/anthropic/v1/messages"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", ANTHROPIC, "/v1/responses")


class Contracts(Prefixes):
    """The contract of each tenant."""

    async def content_of(self, model_uid: str, tenant: str, name: str) -> Any:
        if name != "contract":
            raise PrefixNotFoundError(f"no prefix named {name!r}")
        if tenant == "":
            return {"messages": [{"role": "user", "content": "everybody's contract"}]}
        return {"prompt": f"{tenant}'s contract"}


@pytest.fixture
async def api() -> AsyncIterator[XinferenceApi]:
    api = await XinferenceApi().start(Contracts())
    yield api
    await api.stop()


@pytest.fixture
def tenant(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a request with the key "mallory" and the salt "alice". An extension supplies the salts."""
    if not hasattr(extensions, "CacheSalt"):
        return "alice"  # xinference 4.0 lets no extension do so

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
    assert endpoints == TEXT_ENDPOINTS | WITHOUT_A_TEXT
    assert remember_texts(router) == TEXT_ENDPOINTS == set(BODIES)


def test_the_paths_of_text_routes_are_tested(api: XinferenceApi) -> None:
    assert {*api.paths} == {*PATHS}


@pytest.mark.parametrize("path", PATHS)
async def test_every_text_route_goes_through_the_router(api: XinferenceApi, path: str) -> None:
    answer = await api.ask(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-xavier-replica"] in api.models


@pytest.mark.parametrize("path", PATHS)
async def test_every_text_route_knows_names(api: XinferenceApi, path: str) -> None:
    assert (await api.ask(path, prefix_name="another")).status_code == 404
    assert (await api.ask(path, prefix_name=7)).status_code == 400
    assert not await api.asked()


@pytest.mark.parametrize("path", PATHS[1:])
async def test_every_route_of_chats_begins_with_what_is_named(
    api: XinferenceApi, path: str
) -> None:
    assert (await api.ask(path, prefix_name="contract")).status_code == 200
    ((messages, _),) = await api.asked()
    assert [each["content"] for each in messages] == ["everybody's contract", ANY]


async def test_a_tenants_prefix_is_of_the_salt_that_an_extension_supplies(
    api: XinferenceApi, tenant: str
) -> None:
    answer = await api.ask(
        "/v1/completions", {"x-key": "mallory"}, prefix_name="contract", cache_salt="alice"
    )
    assert answer.status_code == 200, answer.text
    ((prompt, _),) = await api.asked()
    assert prompt == f"{tenant}'s contracthi"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_what_the_router_hashes_is_of_the_supplied_salt(
    api: XinferenceApi, tenant: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    route, texts = api.cluster.router.route, []

    async def note(text: Any, *args: Any, **kwargs: Any) -> Any:
        texts.append(text)
        return await route(text, *args, **kwargs)

    monkeypatch.setattr(api.cluster.router, "route", note)
    more = {"instructions": "many words " * 100}
    answer = await api.ask(path, {"x-key": "mallory"}, cache_salt="alice", **more)
    assert answer.status_code == 200, answer.text
    whole = {**BODIES[api.paths[path]], **more}
    assert texts == [prompt_text({**whole, "cache_salt": tenant})]

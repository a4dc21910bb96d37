"""The router takes a request for what the model gets of it, as xinference has read it: its text,
its session, its named prefix and its tenant."""

import sys
import uuid
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from fastapi.routing import APIRoute
from xinference import extensions

from tests.e2e.text_routes import CHAT
from tests.serving.routing.scenarios import PATHS
from tests.world.world import World, in_world, llm_router, no_prefixes
from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.frontend.question import MAX_TEXT, prompt_text
from xinference_xavier.routing.texts import PIECE, Text
from xinference_xavier.serving.routing import Asked, remember_texts
from xinference_xavier.serving.seam import TEXT_ENDPOINTS

WITHOUT_A_TEXT = {
    "count_anthropic_tokens",
    "anthropic_list_models",
    "anthropic_get_model",
    "create_flexible_infer",
}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


class Told(NamedTuple):
    """What a router is told of a request."""

    text: Text
    session: str


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What the router was told of each request so far."""
    open_route, told = ModelRouter.open, []

    def note(self: ModelRouter, text: Text, session: str, **how: Any) -> Any:
        told.append(Told(text, session))
        return open_route(self, text, session, **how)

    monkeypatch.setattr(ModelRouter, "open", note)
    return told


def shared(first: Told, second: Told) -> int:
    """Bytes of the beginning that they have in common, in whole pieces."""
    pairs = zip(first.text.hashes, second.text.hashes, strict=False)
    return PIECE * sum(one == other for one, other in pairs)


def test_every_route_of_an_llm_is_known_and_tested() -> None:
    """One more in xinference's router is a text route or is named here."""
    router = llm_router()
    routes = {each.path: each.endpoint for each in router.routes if isinstance(each, APIRoute)}
    assert {each.__name__ for each in routes.values()} - WITHOUT_A_TEXT == TEXT_ENDPOINTS
    assert {path for path, each in routes.items() if each.__name__ in TEXT_ENDPOINTS} == {*PATHS}
    assert remember_texts(router) == TEXT_ENDPOINTS


# -- agents ------------------------------------------------------------------------------------

SYSTEM = "You are a coding agent. " * 200
TOOLS = [
    {"name": f"tool{n}", "description": "It does this. " * 50, "input_schema": {"type": "object"}}
    for n in range(3)
]
CODE = "def f(x): return x\n" * 100
MARK = {"cache_control": {"type": "ephemeral"}}


def block(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def turn(number: int, **more: Any) -> dict[str, Any]:
    """What Claude Code sends: a header that is new with each request, a history in which only the
    last message is marked, and results of tools."""
    nonce = f"x-anthropic-billing-header: cc_version=2.1.177; cch={uuid.uuid4().hex[:5]};"
    history: list[dict[str, Any]] = [{"role": "user", "content": "Read the code."}]
    for call in range(number):
        use = {"type": "tool_use", "id": f"t{call}", "name": "tool1", "input": {"path": f"{call}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{call}", "content": CODE}
        history += [
            {"role": "assistant", "content": [block("I read it."), use]},
            {"role": "user", "content": [result]},
        ]
    history += [{"role": "user", "content": [block("What next?" * number, **MARK)]}]
    if number > 1:
        history[0] = {"role": "user", "content": [block("Read the code.")]}
    return {"system": [block(nonce), block(SYSTEM, **MARK)], "messages": history, **more}


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["without tools", "with tools"])
@in_world("m-0", "m-1")
async def test_the_next_turn_of_an_agent_begins_with_its_last_one(
    world: World, told: list[Told], more: dict[str, Any]
) -> None:
    one = await world.answer(path=MESSAGES, **turn(1, **more))
    other = await world.answer(path=MESSAGES, **turn(2, **more))
    first, second = told
    last_question = 200  # bytes that the second turn does not have there
    assert shared(first, second) >= first.text.length - last_question - PIECE
    assert second.text.length - first.text.length > len(CODE)
    assert (other.replica, other.reason) == (one.replica, "local")


@in_world("m-0")
async def test_a_chat_has_the_same_text_on_every_route(world: World, told: list[Told]) -> None:
    asked, salt = {"role": "user", "content": CODE}, {"cache_salt": "a tenant"}
    system = {"role": "system", "content": SYSTEM}
    items = {"instructions": SYSTEM, "input": [{"type": "message", **asked}]}
    await world.answer(path=CHAT, messages=[system, asked], **salt)
    await world.answer(path=MESSAGES, system=[block(SYSTEM, **MARK)], messages=[asked], **salt)
    await world.answer(path=RESPONSES, **items, **salt)
    await world.answer(path=RESPONSES, **items)
    chat, anthropic, responses, of_nobody = (each.text for each in told)
    assert chat == anthropic == responses
    assert not {*chat.hashes} & {*of_nobody.hashes}


@in_world("m-0")
async def test_an_agent_names_its_session(world: World, told: list[Told]) -> None:
    user = {"metadata": {"user_id": f"user_{'0' * 64}_account__session_of-the-body"}}
    for headers in (
        {"x-session-id": "ours", "x-claude-code-session-id": "of-the-header"},
        {"x-claude-code-session-id": "of-the-header"},
        {},
    ):
        await world.answer(path=MESSAGES, headers=headers, **turn(1, **user))
    assert [each.session for each in told] == ["ours", "of-the-header", "of-the-body"]


# -- names and tenants -------------------------------------------------------------------------


async def contracts(model_uid: str, tenant: str, name: str) -> Any:
    """The contract of each tenant."""
    if name != "contract":
        return await no_prefixes(model_uid, tenant, name)
    return {"prompt": f"{tenant}'s contract"}


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


@in_world("m-0")
async def test_every_text_route_knows_names(world: World) -> None:
    for path in PATHS:
        unknown = await world.answer(path=path, prefix_name="another")
        assert (unknown.status, unknown.headers["x-xavier-not-found"]) == (404, "prefix")
        assert (await world.answer(path=path, prefix_name=7)).status == 400
    assert not world.replicas["m-0"].asked


@in_world("m-0", content_of=contracts)
async def test_a_named_text_is_of_the_salt_that_an_extension_supplies(
    world: World, told: list[Told], tenant: str
) -> None:
    """So is what the router hashes, of which the named text is a part."""
    question = "x" * 3000
    named = {"prefix_name": "contract", "cache_salt": "alice", "headers": {"x-key": "mallory"}}
    await world.answer(question, **named)
    whole = f"{tenant}'s contract{question}"
    assert world.replicas["m-0"].prompts == [whole]
    assert told[0].text == prompt_text({"prompt": whole, "cache_salt": tenant})


@pytest.mark.parametrize(
    ("length", "hashed"),
    [(3000, 3007), (300_000, 300_007), (MAX_TEXT, 0)],
    ids=["short", "read aside", "too long to be hashed"],
)
@in_world("m-0", content_of=contracts)
async def test_a_long_body_keeps_its_session_its_prefix_and_its_tenant(
    world: World, told: list[Told], length: int, hashed: int
) -> None:
    await world.answer("x" * length, prompt_cache_key="chat")
    assert [(each.text.length, each.session) for each in told] == [(hashed, "chat")]
    answer = await world.answer("x" * length, cache_salt="alice", prefix_name="contract")
    assert answer.status == 200
    assert world.replicas["m-0"].prompts[1] == f"alice's contract{'x' * length}"


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("手册", "手册".encode()),
        ("café", "café".encode()),
        ("café", "café".encode("latin-1")),
    ],
)
def test_a_name_in_a_header_is_in_utf_8_or_latin_1(name: str, sent: bytes) -> None:
    asked = Asked({"headers": [(b"x-xavier-prefix", sent)]}, None)  # type: ignore[arg-type]
    assert asked._header(b"x-xavier-prefix") == name

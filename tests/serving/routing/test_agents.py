"""The router takes a request for what the model gets of it, as coding agents send it."""

import uuid
from typing import Any

import pytest

from tests.e2e.text_routes import CHAT, route_of
from tests.serving.text_api import TextApi, Told
from xinference_xavier.routing.texts import PIECE, Text

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SYSTEM = "You are a coding agent. " * 200
TOOLS = [
    {"name": f"tool{n}", "description": "It does this. " * 50, "input_schema": {"type": "object"}}
    for n in range(3)
]
CODE = "def f(x): return x\n" * 100
SALT, MARK = {"cache_salt": "a tenant"}, {"cache_control": {"type": "ephemeral"}}


def text(content: str, **more: Any) -> dict[str, Any]:
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
            {"role": "assistant", "content": [text("I read it."), use]},
            {"role": "user", "content": [result]},
        ]
    history += [{"role": "user", "content": [text("What next?" * number, **MARK)]}]
    if number > 1:
        history[0] = {"role": "user", "content": [text("Read the code.")]}
    return {
        "system": [text(nonce), text(SYSTEM, **MARK)],
        "messages": history,
        **more,
    }


async def ask(api: TextApi, path: str, **body: Any) -> Any:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    headers = body.pop("headers", {})
    answer = await api.client.post(path, json={"model": "m", limit: 1, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def is_done(api: TextApi) -> None:
    """The replicas report that they have nothing to do."""
    api.cluster.tell(*map(api.cluster.load, api.models))


def shared(first: Text, second: Text) -> int:
    """Bytes of the beginning that they have in common, in whole pieces."""
    pairs = zip(first.hashes, second.hashes, strict=False)
    return PIECE * sum(one == other for one, other in pairs)


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["without tools", "with tools"])
async def test_the_next_turn_of_an_agent_begins_with_its_last_one(
    text_api: TextApi, told: list[Told], more: dict[str, Any]
) -> None:
    one = await ask(text_api, MESSAGES, **turn(1, **more))
    is_done(text_api)
    other = await ask(text_api, MESSAGES, **turn(2, **more))
    (first, _), (second, _) = told
    last_question = 200  # bytes that the second turn does not have there
    assert shared(first, second) >= first.length - last_question - PIECE
    assert second.length - first.length > len(CODE)
    assert route_of(other) == (route_of(one)[0], "local")


async def test_a_later_system_message_changes_the_beginning(
    text_api: TextApi, told: list[Told]
) -> None:
    """xinference puts all of them first."""
    request = turn(2)
    await ask(text_api, MESSAGES, **request)
    request["messages"].insert(3, {"role": "system", "content": "Mind the plan."})
    await ask(text_api, MESSAGES, **request)
    assert len(SYSTEM) - PIECE <= shared(told[0][0], told[1][0]) <= len(SYSTEM) + PIECE


async def test_a_chat_has_the_same_text_on_every_route(text_api: TextApi, told: list[Told]) -> None:
    asked = {"role": "user", "content": CODE}
    items = {"instructions": SYSTEM, "input": [{"type": "message", **asked}]}
    await ask(text_api, CHAT, messages=[{"role": "system", "content": SYSTEM}, asked], **SALT)
    await ask(text_api, MESSAGES, system=[text(SYSTEM, **MARK)], messages=[asked], **SALT)
    await ask(text_api, RESPONSES, **items, **SALT)
    await ask(text_api, RESPONSES, **items)
    chat, anthropic, responses, of_nobody = (each for each, _ in told)
    assert chat == anthropic == responses
    assert not {*chat.hashes} & {*of_nobody.hashes}


async def test_an_agent_names_its_session(text_api: TextApi, told: list[Told]) -> None:
    user = {"metadata": {"user_id": f"user_{'0' * 64}_account__session_of-the-body"}}
    for headers in (
        {"x-session-id": "ours", "x-claude-code-session-id": "of-the-header"},
        {"X-Claude-Code-Session-Id": "of-the-header"},
        {},
    ):
        await ask(text_api, MESSAGES, **turn(1, **user), headers=headers)
    assert [session for _, session in told] == ["ours", "of-the-header", "of-the-body"]

"""The API process keeps prefixes from its start to its end, and asks replicas like a client."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from tests.frontend.test_keeper import Cluster
from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend.prefix import NewPrefix, Terms
from xinference_xavier.serving import prefixes as module
from xinference_xavier.serving.prefixes import FILE, Prefixes, Starting

MODEL = "model"
GUIDE = NewPrefix("guide", "", {"prompt": "text"}, Terms())


class Model:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def generate(self, prompt: str, config: Any, **how: Any) -> None:
        self.asked.append(("generate", prompt, config, how))

    async def chat(self, messages: Any, config: Any, **how: Any) -> None:
        self.asked.append(("chat", messages, config, how))


class Supervisor:
    def __init__(self) -> None:
        self.models = {"m-0": Model()}

    async def get_model(self, name: str, xavier_replica: bool = False) -> Model:
        assert xavier_replica
        return self.models[name]


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor()


def made(supervisor: Supervisor, home: Path) -> Prefixes:
    async def get() -> Supervisor:
        return supervisor

    trackers: Any = SimpleNamespace(call=Cluster().call, routers={})
    return Prefixes(trackers, get, home)


@pytest.fixture
async def prefixes(supervisor: Supervisor, tmp_path: Path) -> AsyncIterator[Prefixes]:
    prefixes = made(supervisor, tmp_path)
    yield prefixes
    await prefixes.close()


async def test_they_are_kept_with_the_server_s_start(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    prefixes, reached = made(supervisor, tmp_path), []

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
    prefixes: Prefixes, tmp_path: Path
) -> None:
    (tmp_path / FILE).mkdir(parents=True)
    await prefixes.start()
    with pytest.raises(HTTPException) as refused:
        await prefixes.content_of(MODEL, "", "guide")
    assert refused.value.status_code == 503
    assert "the names of prefixes cannot be read" in refused.value.detail
    status = prefixes.status(MODEL)
    assert status["prefix_file_failures"] == 1
    assert (status["prefixes"], status["prefix_states"]) == ([], {})
    (tmp_path / FILE).rmdir()
    await prefixes.names.tend()
    await prefixes.names.add(MODEL, GUIDE)
    assert await prefixes.content_of(MODEL, "", "guide") == GUIDE.content


async def test_only_names_without_a_tenant_are_public(prefixes: Prefixes) -> None:
    await prefixes.start()
    await prefixes.names.add(MODEL, GUIDE)
    await prefixes.names.add(MODEL, GUIDE._replace(name="secret", tenant="a"))
    status = prefixes.status(MODEL)
    assert [each["name"] for each in status["prefixes"]] == ["guide"]
    async with asyncio.timeout(30):
        while status["prefix_states"] != {"waiting": 2}:
            await asyncio.sleep(0)
            status = prefixes.status(MODEL)


async def test_a_request_gets_a_name_s_content(prefixes: Prefixes) -> None:
    await prefixes.start()
    await prefixes.names.add(MODEL, GUIDE)
    assert await prefixes.content_of(MODEL, "", "guide") == GUIDE.content
    with pytest.raises(PrefixNotFoundError):
        await prefixes.content_of(MODEL, "b", "guide")


async def test_the_status_shows_those_that_were_used_last(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHOWN", 2)
    await prefixes.start()
    for name in "abcd":
        await prefixes.names.add(MODEL, GUIDE._replace(name=name))
    await prefixes.content_of(MODEL, "", "b")
    assert [each["name"] for each in prefixes.status(MODEL)["prefixes"]] == ["b", "d"]


async def test_while_names_cannot_be_read_a_request_is_told_so(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HTTPException, match="503: the server starts"):
        await prefixes.content_of(MODEL, "", "guide")
    await prefixes.start()
    await prefixes.names.add(MODEL, GUIDE)

    def fails(*args: object) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(prefixes.names._store, "_version", fails)
        with pytest.raises(HTTPException, match="503: the names of prefixes cannot be read: disk"):
            await prefixes.content_of(MODEL, "", "guide")
    assert await prefixes.content_of(MODEL, "", "guide") == GUIDE.content


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
    prefixes: Prefixes, supervisor: Supervisor, content: Any, tenant: str, asked: Any
) -> None:
    await prefixes.start()
    await prefixes._ask(MODEL, "m-0", content, tenant, "number 1")
    assert supervisor.models["m-0"].asked == [(*asked, {"request_id": "number 1"})]

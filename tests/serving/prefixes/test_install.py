"""The API process keeps prefixes from its start to its end, and asks replicas like a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.frontend.prefixes.test_keeper import Cluster
from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend.prefixes.prefix import NewPrefix, Terms
from xinference_xavier.serving.prefixes.install import FILE, Prefixes, Starting

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

    async def xavier_replica(self, name: str) -> Model:
        return self.models[name]


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor()


@pytest.fixture
async def prefixes(supervisor: Supervisor, tmp_path: Path) -> AsyncIterator[Prefixes]:
    async def get() -> Supervisor:
        return supervisor

    trackers: Any = SimpleNamespace(call=Cluster().call, routers={})
    prefixes = Prefixes(trackers, get, tmp_path)
    yield prefixes
    await prefixes.close()


async def test_they_are_kept_with_the_server_s_start(prefixes: Prefixes, tmp_path: Path) -> None:
    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append((scope["type"], prefixes.failure))

    starting = Starting(app, prefixes)
    await starting({"type": "http"}, None, None)  # type: ignore[arg-type]
    await starting({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert reached == [("http", "the server starts; ask again"), ("lifespan", "")]
    assert (tmp_path / FILE).exists()


async def test_a_file_that_cannot_be_read_is_said_and_leaves_the_server_alone(
    prefixes: Prefixes, tmp_path: Path
) -> None:
    (tmp_path / FILE).mkdir(parents=True)
    await prefixes.start()
    assert "the names of prefixes cannot be read" in prefixes.failure
    assert prefixes.status(MODEL) == {"prefixes": [], "prefix_states": {}}


async def test_only_names_without_a_tenant_are_public(prefixes: Prefixes) -> None:
    await prefixes.start()
    await prefixes.names.add(MODEL, GUIDE)
    await prefixes.names.add(MODEL, GUIDE._replace(name="secret", tenant="a"))
    status = prefixes.status(MODEL)
    assert [each["name"] for each in status["prefixes"]] == ["guide"]
    assert status["prefix_states"] == {"waiting": 2}


async def test_a_request_gets_a_name_s_content(prefixes: Prefixes) -> None:
    await prefixes.start()
    await prefixes.names.add(MODEL, GUIDE)
    assert await prefixes.content_of(MODEL, "", "guide") == GUIDE.content
    with pytest.raises(PrefixNotFoundError):
        await prefixes.content_of(MODEL, "b", "guide")


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

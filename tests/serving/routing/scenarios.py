"""What the tests of routes have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.e2e.text_routes import TEXT_ROUTES
from tests.world.world import Answer, Supervisor

PATHS = (*TEXT_ROUTES, "/anthropic/v1/messages")
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def assert_in_turn(answer: Answer) -> None:
    assert (answer.status, answer.replica) == (200, ""), answer.body


def assert_refused(answer: Answer) -> None:
    assert answer.status == 429, answer.body
    assert int(answer.headers["retry-after"]) >= 1
    assert "limit" in answer.body.decode()
    assert not answer.replica


def search(monkeypatch: pytest.MonkeyPatch, find: Callable[[str], Awaitable[None]]) -> None:
    """The supervisor does `find` before it says where a replica is."""
    original = Supervisor.get_model

    async def get_model(
        self: Supervisor, name: str, xavier_replica: bool = False, **more: Any
    ) -> Any:
        if xavier_replica:
            await find(name)
        return await original(self, name, xavier_replica, **more)

    monkeypatch.setattr(Supervisor, "get_model", get_model)

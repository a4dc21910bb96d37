"""The question of `explain`, as xinference gets it."""

import json

import httpx
import pytest
from click.testing import CliRunner

from xinference_xavier.cli.commands import main


def test_tools_are_part_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their text begins the prompt."""
    asked: list[object] = []

    def answer(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(404)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    chat = {"messages": [{"role": "user", "content": "What?"}], "tools": [{"type": "function"}]}
    request = json.dumps({**chat, "temperature": 0})
    CliRunner().invoke(main, ["explain", "m", "--chat", "--prompt-file", "-"], input=request)
    assert asked == [chat]

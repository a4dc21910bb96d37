"""Prefixes get a name on the command line, and chats are explained; the server is a stand-in."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from click.testing import CliRunner, Result

from xinference_xavier.cli.commands import main
from xinference_xavier.client import client as module

PATH = "/v1/xavier/m/prefixes"
MESSAGES = [{"role": "system", "content": "You are a guide."}]


class Server:
    """Prefixes take three looks to be computed. It explains nothing."""

    def __init__(self) -> None:
        self.added: dict[str, Any] = {}
        self.changed: dict[str, Any] = {}
        self.looks = 0
        self.end = "kept"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = unquote(request.url.path)
        if request.method == "POST":
            self.added = json.loads(request.content)
            return httpx.Response(201, json=self.report()) if path == PATH else httpx.Response(404)
        if path == PATH:
            return httpx.Response(200, json={"prefixes": [self.report()] if self.added else []})
        if path != f"{PATH}/{self.added['name']}":
            headers = {"x-xavier-not-found": "prefix"}
            return httpx.Response(404, json={"detail": "no such prefix"}, headers=headers)
        if request.method == "PATCH":
            self.changed = json.loads(request.content)
            return httpx.Response(200, json={**self.report(), **self.changed})
        self.looks += 1
        return httpx.Response(200, json=self.report())

    def report(self) -> dict[str, Any]:
        done = self.looks >= 3
        copy = {"tokens": 1300, "chunks": 10, "held": 10 if done else self.looks, "firm": False}
        return {
            **{"name": self.added["name"], "state": self.end if done else "computing"},
            **{"reason": "it is too long" if done and self.end == "failed" else ""},
            **{"tokens": 1300, "chunks": 10, "replicas": {"m-rep0": copy}, "ttl": 3600.0},
            **{"copies": 1, "retention": "soft", "created": 0.0, "used": 0.0, "expires": 4e9},
        }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(module, "TICK", 0.0)
    client = partial(httpx.Client, transport=httpx.MockTransport(server))
    monkeypatch.setattr(httpx, "Client", client)
    return server


def run(command: str, *words: str, text: str | None = None) -> Result:
    words = ("prefix", command, "-e", "http://xinference", "-k", "key", "m", *words)
    return CliRunner().invoke(main, words, input=text)


def test_a_prompt_is_kept_when_the_command_returns(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "guide.txt"
    file.write_text("a long text")
    done = run("add", "guide", "--file", str(file), "--copies", "all", "--ttl", "7d")
    assert (done.exit_code, server.looks) == (0, 3)
    assert done.stdout == "guide: kept, 1,300 tokens in 10 chunks\n"
    terms = {"ttl": "7d", "copies": "all", "retention": "soft"}
    assert server.added == {"name": "guide", "prompt": "a long text", **terms}


def test_messages_come_from_standard_input(server: Server) -> None:
    chat = {"messages": MESSAGES, "tools": [{"type": "function"}], "model": "ignored"}
    done = run("add", "guide", "--file", "-", "--chat", "--no-wait", text=json.dumps(chat))
    assert (done.exit_code, server.looks) == (0, 0)
    assert (server.added["messages"], server.added["tools"]) == (MESSAGES, chat["tools"])
    assert run("add", "guide", "--file", "-", "--chat", text=json.dumps(MESSAGES)).exit_code == 0
    assert server.added["messages"] == MESSAGES


def test_tools_are_part_of_a_chat_to_be_explained(server: Server) -> None:
    """Their text begins the prompt."""
    chat = {"messages": MESSAGES, "tools": [{"type": "function"}]}
    words = ["explain", "-e", "http://xinference", "-k", "key", "m", "--chat", "--prompt-file", "-"]
    words += ["--cache-salt", "a"]
    CliRunner().invoke(main, words, input=json.dumps({**chat, "temperature": 0}))
    assert server.added == {**chat, "cache_salt": "a"}


def test_a_prefix_that_cannot_be_computed(server: Server) -> None:
    server.end = "failed"
    done = run("add", "guide", "--file", "-", text="text")
    assert done.exit_code == 1
    assert "Error: guide cannot be computed: it is too long" in done.stderr


def test_prefixes_are_listed_and_shown(server: Server) -> None:
    assert run("list").stdout.strip() == "No prefix has a name yet."
    run("add", "travel guide", "--file", "-", text="text")
    line = run("list").stdout.splitlines()[1]
    assert line.split()[:5] == ["travel", "guide", "kept", "soft", "m-rep0"]
    assert json.loads(run("list", "--json").stdout)[0] == server.report()
    assert json.loads(run("show", "travel guide").stdout) == server.report()


def test_terms_are_set_without_the_text(server: Server) -> None:
    run("add", "guide", "--file", "-", text="text")
    done = run("set", "guide", "--copies", "1", "--retention", "hard")
    assert done.stdout == "guide: ttl 3600 s, copies 1, retention hard\n"
    assert server.changed == {"copies": 1, "retention": "hard"}
    assert "nothing is given; give --ttl, --copies or --retention" in run("set", "guide").stderr


def test_a_prefix_is_removed(server: Server) -> None:
    run("add", "guide", "--file", "-", text="text")
    assert run("remove", "guide").stdout == "guide is removed\n"
    assert run("remove", "another").exit_code == 4

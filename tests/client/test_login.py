"""Whose token a client sends: the key that it is given, or what `xinference login` has stored."""

from functools import partial
from pathlib import Path

import httpx
import pytest
from xinference.deploy.cmdline import get_hash_endpoint

from xinference_xavier.client import XavierClient

HERE = "http://here:9997"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))
    return tmp_path


def log_in(home: Path, endpoint: str, token: str) -> Path:
    """Store a token as `xinference login` does."""
    file = home / "auth" / get_hash_endpoint(endpoint)
    file.parent.mkdir(exist_ok=True)
    file.write_text(token)
    return file


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The keys of all requests."""
    keys: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=transport))
    return keys


def ask(endpoint: str = HERE, api_key: str | None = None) -> None:
    with XavierClient(endpoint, api_key) as client:
        client.cluster()


def test_a_key_wins_over_a_login(home: Path, sent: list[str | None]) -> None:
    log_in(home, HERE, "of-login\n")
    ask()
    ask(api_key="given")
    assert sent == ["Bearer of-login", "Bearer given"]


def test_a_login_is_sent_only_to_its_own_endpoint(home: Path, sent: list[str | None]) -> None:
    log_in(home, HERE, "of-login")
    ask("http://there")
    assert sent == [None]


def test_a_missing_empty_or_unreadable_login_is_no_login(
    home: Path, sent: list[str | None]
) -> None:
    ask()
    file = log_in(home, HERE, " \n")
    ask()
    file.unlink()
    file.mkdir()
    ask()
    assert sent == [None] * 3


def test_without_its_variable_the_home_of_xinference_is_the_user_s(
    home: Path, sent: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XINFERENCE_HOME")
    monkeypatch.setenv("HOME", str(home))
    (home / ".xinference").mkdir()
    log_in(home / ".xinference", HERE, "of-login")
    ask()
    assert sent == ["Bearer of-login"]

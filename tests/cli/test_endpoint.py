"""Which endpoint and which key a command uses; what becomes of errors is in `test_commands.py`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple, Self

import click
import pytest
from click.testing import CliRunner

from xinference_xavier.cli import endpoint as module
from xinference_xavier.cli.endpoint import stored_token, with_client

HERE = "http://here:9997"


class Client(NamedTuple):
    """Stands for a client; what a command makes it with."""

    endpoint: str
    api_key: str | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "XavierClient", Client)
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))
    for name in ("XINFERENCE_ENDPOINT", "XINFERENCE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def log_in(home: Path, endpoint: str, token: str) -> Path:
    """As `xinference login` leaves it."""
    file = home / "auth" / hashlib.sha256(endpoint.encode()).hexdigest()
    file.parent.mkdir(exist_ok=True)
    file.write_text(token)
    return file


def used(*words: str) -> Client:
    seen: list[Client] = []

    @click.command()
    @with_client
    def command(client: Client) -> None:
        seen.append(client)

    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_by_default_it_is_xinferences_own_port_and_nobody() -> None:
    assert used() == Client("http://127.0.0.1:9997", None)


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFERENCE_ENDPOINT", HERE)
    monkeypatch.setenv("XINFERENCE_API_KEY", "of-environment")
    assert used() == Client(HERE, "of-environment")
    assert used("-e", "http://there", "-k", "given") == Client("http://there", "given")


def test_a_key_wins_over_a_login(home: Path) -> None:
    log_in(home, HERE, "of-login\n")
    assert used("-e", HERE) == Client(HERE, "of-login")
    assert used("-e", HERE, "-k", "given").api_key == "given"


def test_a_login_is_shown_to_none_but_the_endpoint_that_it_is_for(home: Path) -> None:
    log_in(home, HERE, "of-login")
    assert used("-e", "http://there").api_key is None


def test_no_login_an_empty_one_and_one_that_cannot_be_read_are_none(home: Path) -> None:
    assert stored_token(HERE) is None
    file = log_in(home, HERE, " \n")
    assert stored_token(HERE) is None
    file.unlink()
    file.mkdir()
    assert stored_token(HERE) is None


def test_without_xinferences_variable_its_folder_is_the_users(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XINFERENCE_HOME")
    monkeypatch.setenv("HOME", str(home))
    (home / ".xinference").mkdir()
    log_in(home / ".xinference", HERE, "of-login")
    assert stored_token(HERE) == "of-login"

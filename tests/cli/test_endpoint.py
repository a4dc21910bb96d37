"""Which endpoint and which key a command uses; `test_commands.py` tests errors."""

from pathlib import Path
from typing import NamedTuple, Self

import click
import pytest
from click.testing import CliRunner
from xinference.deploy.cmdline import get_hash_endpoint

from xinference_xavier.cli import endpoint as module
from xinference_xavier.cli.endpoint import stored_token, with_client

HERE = "http://here:9997"


class Client(NamedTuple):
    """Stands in for a client and records its arguments."""

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
    """Store a token as `xinference login` does."""
    file = home / "auth" / get_hash_endpoint(endpoint)
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


def test_the_default_is_the_port_of_xinference_without_a_key() -> None:
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


def test_a_login_is_sent_only_to_its_own_endpoint(home: Path) -> None:
    log_in(home, HERE, "of-login")
    assert used("-e", "http://there").api_key is None


def test_a_missing_empty_or_unreadable_login_is_no_login(home: Path) -> None:
    assert stored_token(HERE) is None
    file = log_in(home, HERE, " \n")
    assert stored_token(HERE) is None
    file.unlink()
    file.mkdir()
    assert stored_token(HERE) is None


def test_without_its_variable_the_home_of_xinference_is_the_user_s(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XINFERENCE_HOME")
    monkeypatch.setenv("HOME", str(home))
    (home / ".xinference").mkdir()
    log_in(home / ".xinference", HERE, "of-login")
    assert stored_token(HERE) == "of-login"

"""The endpoint and the key that a command uses; `test_commands.py` tests errors, and
`client/test_login.py` what is used without a key."""

from typing import NamedTuple, Self

import click
import pytest
from click.testing import CliRunner

from xinference_xavier.cli import endpoint as module
from xinference_xavier.cli.endpoint import with_client

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
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "XavierClient", Client)
    for name in ("XINFERENCE_ENDPOINT", "XINFERENCE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


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
    assert used("-k", "") == Client("http://127.0.0.1:9997", None)


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFERENCE_ENDPOINT", HERE)
    monkeypatch.setenv("XINFERENCE_API_KEY", "of-environment")
    assert used() == Client(HERE, "of-environment")
    assert used("-e", "http://there", "-k", "given") == Client("http://there", "given")

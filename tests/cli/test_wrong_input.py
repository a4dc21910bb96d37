"""Wrong arguments and files are refused with a sentence that has the value, the reason and the
remedy, before anything is asked or started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from xinference_xavier.cli.commands import main

NO_TEXT = "\udcff"
"""What Python makes of an argument's byte that is no UTF-8."""
LONG = "a" * 300
POOL = ["--xavier_pool_bytes", "1GiB"]
CONVERT = "is not UTF-8; convert it"
URL = "is not a server's URL; write for example"
ADDRESS = "is not of the form host:port, with a port of at most 65535; use an address such as"


def refused(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "-e", "http://host:port"], URL),
        (["status", "-e", "http://host:99999"], URL),
        (["status", "-e", f"http://{LONG}"], URL),
        (["status", "-e", "host:9997"], URL),
        (["status", "-e", ""], URL),
        (["status", "-k", "clé"], "api_key='é' is no part of a key; copy the key again"),
        (["status", "-k", "a\nb"], "is no part of a key"),
        (["status", NO_TEXT], CONVERT),
        (["status", "-e", f"http://{NO_TEXT}"], CONVERT),
        (["prefix", "show", "m", NO_TEXT], CONVERT),
        (["prefix", "list", "m", "--cache-salt", NO_TEXT], CONVERT),
        (["tracker", "m", "--address", "host:99999"], ADDRESS),
        (["tracker", "m", "--address", f"{LONG}:9920"], ADDRESS),
        (["tracker", "m", "--address", "host:9920", "--xavier_hooks", "x"], "name a function"),
        (["transfer-config", "m", "--address", "host:99999", *POOL], ADDRESS),
    ],
)
def test_arguments(words: list[str], message: str) -> None:
    assert message in refused(*words)


@pytest.mark.parametrize(
    "command", [["explain", "m", "--prompt-file"], ["prefix", "add", "m", "n", "--file"]]
)
@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"\xff\xfe", [], "is not UTF-8 ("),
        (b"{", ["--chat"], "--chat: the file is not JSON ("),
        (b"[" * 100_000, ["--chat"], "--chat: the file is not JSON ("),
        (b'{"tools": []}', ["--chat"], "has no list of messages; write"),
        (b'{"messages": 5}', ["--chat"], "has no list of messages; write"),
        (b"7", ["--chat"], "has no list of messages; write"),
    ],
)
def test_files(
    tmp_path: Path, command: list[str], content: bytes, options: list[str], message: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert message in refused(*command, str(file), *options)

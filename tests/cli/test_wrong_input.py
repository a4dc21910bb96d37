"""Wrong arguments and files are refused with a sentence that has the value, the reason and the
remedy, before anything is asked or started."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from xinference_xavier.cli.commands import main
from xinference_xavier.options import ONLY_UNDER_XINFERENCE

NO_TEXT = "\udcff"
"""What Python makes of an argument's byte that is no UTF-8."""
LONG = "a" * 300
POOL = ["--xavier_pool_bytes", "1GiB"]
TRACKER = ["tracker", "m", "--address", "127.0.0.1:0"]
CONFIG = ["transfer-config", "m", "--address"]
HERE = "10.0.0.1:9920"
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
        (["status", "-e", f"http://{NO_TEXT}"], URL),
        (["prefix", "show", "m", NO_TEXT], CONVERT),
        (["prefix", "list", "m", "--cache-salt", NO_TEXT], CONVERT),
        (["tracker", "m", "--address", "host:99999"], ADDRESS),
        (["tracker", "m", "--address", f"{LONG}:9920"], ADDRESS),
        (
            [*TRACKER, "--xavier-hooks", "nonsense"],
            "'nonsense' does not name a function",
        ),
        ([*TRACKER, "--xavier-hooks", "nowhere:page"], "'nowhere:page' cannot be imported"),
        ([*TRACKER, *POOL], "No such option '--xavier_pool_bytes'"),
        ([*CONFIG, "host:99999", *POOL], ADDRESS),
        ([*CONFIG, "10.0.0.1"], ADDRESS),
        ([*CONFIG, "10.0.0.1:0"], "has no port"),
        ([*CONFIG, "0.0.0.0:9920"], "is not an address that replicas can reach"),
        ([*CONFIG, HERE], "xavier_pool_bytes=None is required without xinference"),
        *(
            (
                [*CONFIG, HERE, *POOL, f"--{name}", "1"],
                f"{name}='1' does nothing in a server without xinference",
            )
            for name in ONLY_UNDER_XINFERENCE
        ),
        ([*CONFIG, HERE, "--name", "a b"], "name='a b' is not a name"),
        ([*CONFIG, HERE, "--xavier_pool_bytes", "4QiB"], "is not a size"),
        ([*CONFIG, HERE, "--xavier_pool_bytes"], "'--xavier_pool_bytes' requires an argument"),
        (
            [*CONFIG, HERE, "--xavier_pool", "4GiB"],
            "(Did you mean one of: '--xavier_hooks', '--xavier_pool_bytes', '--xavier_roles'?)",
        ),
        ([*CONFIG, HERE, "x"], "unexpected extra argument (x)"),
        ([*CONFIG, HERE, "--x"], "No such option '--x'"),
        ([*CONFIG, HERE, *POOL, "x"], "unexpected extra argument (x)"),
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

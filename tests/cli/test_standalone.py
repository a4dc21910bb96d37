"""A tracker and a configuration for vLLM servers without xinference."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from examples.processes import free_port
from tests.harness.replicas import MODEL, ReplicaProcess
from xinference_xavier.cli.commands import main
from xinference_xavier.config import XavierConfig, own_transfer_config
from xinference_xavier.options import PARSERS

pytestmark = pytest.mark.process

ADDRESS = ["--address", "10.0.0.1:9920"]
PROGRAM = Path(sys.executable).parent / "xinference-xavier"


def configure(*words: str) -> Result:
    return CliRunner().invoke(main, ["transfer-config", *words])


def weights(address: str, version: str) -> tuple[int, str]:
    """The command's exit code and what it prints."""
    words = [PROGRAM, "weights", MODEL, version, "--tracker", address]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_tracker_in_a_process_of_its_own() -> None:
    """It prints its address and each replica that joins, takes a version of the weights, ends on
    SIGINT, and refuses a taken port."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    words = [PROGRAM, "tracker", MODEL, "--address", address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"the tracker of {MODEL} listens at {address}\n"
            replica = ReplicaProcess("first", address)
            try:
                assert "ReplicaJoined" in process.stdout.readline()
                code, text = weights(address, "step-1")
                assert code == 3
                assert "not reset since the last version: first" in text
                replica.reset()
                assert weights(address, "step-2") == (0, "1 replicas share as step-2\n")
            finally:
                replica.kill()
            second = CliRunner().invoke(main, ["tracker", "m", "--address", address])
            assert second.exit_code == 1
            assert f"address='{address}' cannot be used" in second.output
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0
            code, text = weights(address, "step-3")
            assert code == 3
            assert f"no tracker of {MODEL} answers at {address}" in text
        finally:
            process.kill()


def test_vllm_gets_our_configuration() -> None:
    result = configure(
        "m", "--address", "10.0.0.1:9920", "--xavier_pool_bytes", "1GiB", "--xavier_fetch_timeout=2"
    )
    assert result.exit_code == 0, result.output
    transfer = own_transfer_config(result.stdout)
    assert transfer is not None
    told = XavierConfig.from_dict(transfer["kv_connector_extra_config"]["xavier"])
    assert told == XavierConfig("m", "10.0.0.1:9920", pool_bytes=1 << 30, fetch_timeout=2.0)
    assert result.stdout.count("\n") == 1, "one line, to be passed as one argument"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--address", "10.0.0.1:9920"], "xavier_pool_bytes=None is required without xinference"),
        (["--address", "0.0.0.0:9920"], "is not an address that replicas can reach"),
        (["--address", "10.0.0.1:0"], "has no port"),
        (["--address", "10.0.0.1"], "is not of the form host:port"),
        (["--address", "10.0.0.1:9920", "--name", "a b"], "name='a b' is not a name"),
        (["--address", "10.0.0.1:9920", "--xavier_pool_bytes", "4QiB"], "is not a size"),
        (
            ["--address", "10.0.0.1:9920", "--xavier_pool", "4GiB"],
            "(Did you mean one of: '--xavier_hooks', '--xavier_pool_bytes', '--xavier_roles'?)",
        ),
        (
            ["--address", "10.0.0.1:9920", "--xavier_pool_bytes"],
            "'--xavier_pool_bytes' requires an argument",
        ),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], sentence: str) -> None:
    result = configure("m", *words)
    assert result.exit_code == 2
    assert sentence in result.output


def test_a_server_may_have_a_name() -> None:
    """Another configuration is as before."""
    words = ["m", *ADDRESS, "--xavier_pool_bytes", "1GiB"]
    told = []
    for result in (configure(*words), configure(*words, "--name", "a")):
        transfer = own_transfer_config(result.stdout)
        assert transfer is not None
        told.append(XavierConfig.from_dict(transfer["kv_connector_extra_config"]["xavier"]))
    assert [config.replica for config in told] == [None, "a"]


def test_every_launch_option_is_taken_with_either_dash() -> None:
    plain = [*ADDRESS, "--xavier_pool_bytes", "1GiB", "--xavier_hooks", "ops:page"]
    dashed = [word.replace("xavier_", "xavier-").replace("_", "-") for word in plain]
    assert configure("m", *plain).stdout == configure("m", *dashed).stdout != ""
    known = {option.name for option in main.commands["transfer-config"].params}
    assert known >= set(PARSERS)


@pytest.mark.parametrize("words", [["x"], ["--x"], ["--xavier_pool_bytes", "1GiB", "x"]])
def test_unknown_words_are_refused(words: list[str]) -> None:
    assert configure("m", *ADDRESS, *words).exit_code == 2


def test_a_tracker_takes_its_hooks_and_nothing_else() -> None:
    words = ["tracker", "m", "--address", "127.0.0.1:0"]
    refused = CliRunner().invoke(main, [*words, "--xavier-hooks", "nonsense"])
    assert "xavier_hooks='nonsense' does not name a function" in refused.output
    assert CliRunner().invoke(main, [*words, "--xavier_pool_bytes", "1GiB"]).exit_code == 2

"""A tracker and a configuration for vLLM servers without xinference; `test_wrong_input.py` has what
is refused."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xoscar
from click.testing import CliRunner, Result

from examples.processes import free_port
from tests.harness.replicas import MODEL, ReplicaProcess
from xinference_xavier.cli import standalone
from xinference_xavier.cli.commands import main
from xinference_xavier.config import XavierConfig, own_config
from xinference_xavier.options import ONLY_UNDER_XINFERENCE, PARSERS, RETIRED
from xinference_xavier.protocol.tracker import Member, Settings, tracker_uid
from xinference_xavier.runtime.aio import within

ADDRESS = ["--address", "10.0.0.1:9920"]
PROGRAM = Path(sys.executable).parent / "xinference-xavier"


def configure(*words: str) -> Result:
    return CliRunner().invoke(main, ["transfer-config", *words])


def told(*words: str) -> XavierConfig:
    """The configuration that vLLM gets."""
    result = configure("m", *ADDRESS, *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1, "one line, to be passed as one argument"
    config = own_config(result.stdout)
    assert config is not None
    return config


def weights(address: str, version: str) -> tuple[int, str]:
    """The command's exit code and what it prints."""
    words = [PROGRAM, "weights", MODEL, version, "--tracker", address]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.process
def test_a_tracker_in_a_process_of_its_own() -> None:
    """It prints its address and each replica that joins, takes a version of the weights, ends on
    SIGINT, and refuses a taken port."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    words = [PROGRAM, "tracker", MODEL, "--address", address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"the tracker of {MODEL} listens at {address}\n"
            with ReplicaProcess("first", address) as replica:
                assert "ReplicaJoined" in process.stdout.readline()
                code, text = weights(address, "step-1")
                assert code == 3
                assert "not reset since the last version: first" in text
                replica.reset()
                assert weights(address, "step-2") == (0, "1 replicas share as step-2\n")
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


async def test_an_event_that_cannot_be_printed_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk of the output may be full for a moment."""
    monkeypatch.setattr(standalone, "LOOK", 0.0)
    address = asyncio.get_running_loop().create_future()
    told, printed = list[str](), asyncio.Event()

    def on_event(event: Any) -> None:
        told.append(event["replica"])
        if len(told) == 1:
            raise OSError("no space left on device")
        printed.set()

    until = asyncio.Event()
    serving = asyncio.ensure_future(
        standalone.serve(
            MODEL,
            "127.0.0.1:0",
            hooks=None,
            listening=address.set_result,
            on_event=on_event,
            until=until,
        )
    )
    listens_at = await within(30.0, address)
    tracker = await xoscar.actor_ref(address=listens_at, uid=tracker_uid(MODEL))
    for name in ("first", "second"):
        await tracker.join("ns", Member(name, "127.0.0.1:1"), Settings(), name)
    await within(30.0, printed.wait())
    until.set()
    await serving
    assert told == ["first", "second"]


def test_vllm_gets_our_configuration() -> None:
    expected = XavierConfig("m", "10.0.0.1:9920", pool_bytes=1 << 30, fetch_timeout=2.0)
    assert told("--xavier_pool_bytes", "1GiB", "--xavier_fetch_timeout=2") == expected


def test_a_server_may_have_a_name() -> None:
    """Another configuration is as before."""
    pool = ["--xavier_pool_bytes", "1GiB"]
    assert told(*pool).replica is None
    assert told(*pool, "--name", "a").replica == "a"


def test_only_what_is_not_a_default_is_printed() -> None:
    printed = json.loads(configure("m", *ADDRESS, "--xavier_pool_bytes", "1GiB").stdout)
    assert printed["kv_connector_extra_config"]["xavier"] == {
        "model_uid": "m",
        "tracker_address": "10.0.0.1:9920",
        "pool_bytes": 1 << 30,
    }


def test_every_launch_option_is_taken_with_either_dash() -> None:
    plain = [*ADDRESS, "--xavier_pool_bytes", "1GiB", "--xavier_transport", "gloo"]
    dashed = [word.replace("xavier_", "xavier-").replace("_", "-") for word in plain]
    assert configure("m", *plain).stdout == configure("m", *dashed).stdout != ""
    options = main.commands["transfer-config"].params
    assert {each.name for each in options} >= {*PARSERS, *RETIRED}
    offered = {each.name for each in options if not getattr(each, "hidden", False)}
    assert offered - {"model", "address", "name"} == PARSERS.keys() - {*ONLY_UNDER_XINFERENCE}

"""Two `vllm serve` and a tracker, without xinference: the example, as in its README."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from examples.plain_vllm import ask
from examples.processes import answers, free_port, start
from tests.e2e.conftest import ROOT
from tests.e2e.model import wait_for_engine
from tests.e2e.plain import ARGUMENTS, ENVIRONMENT, HOST, serve, wait_until_compared

pytestmark = pytest.mark.long

SCRIPT = ROOT / "examples" / "plain_vllm" / "serve.sh"
END_TIMEOUT = 120.0


class Servers(NamedTuple):
    tracker: str
    endpoints: dict[str, str]
    """The servers by name."""


@pytest.fixture(scope="module")
def servers(model_folder: Path) -> Iterator[Servers]:
    """Two servers; at the end, the script stops everything that it started."""
    tracker, *ports = (str(free_port(HOST)) for _ in range(3))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= ENVIRONMENT | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TRACKER_PORT": tracker,
        "PORTS": " ".join(ports),
        "POOL": "256MiB",
    }
    log = ROOT / "build" / "test-plain-vllm.log"
    script = start([SCRIPT, model_folder, *ARGUMENTS], log, environment)
    started = psutil.Process(script.pid)
    try:
        endpoints = [f"http://{HOST}:{port}" for port in ports]
        health = [f"{endpoint}/health" for endpoint in endpoints]
        wait_for_engine(
            lambda: script.poll() is not None or all(map(answers, health)),
            "both servers answer",
        )
        assert script.poll() is None, log.read_text()[-4000:]
        wait_for_engine(lambda: serve(f"{HOST}:{tracker}"), "both can be fetched from")
        names = [f"vllm-{port}" for port in ports]
        yield Servers(f"{HOST}:{tracker}", dict(zip(names, endpoints, strict=True)))
    finally:
        processes = started.children(recursive=True) if script.poll() is None else []
        script.send_signal(signal.SIGTERM)
        script.wait(END_TIMEOUT)
        _, left = psutil.wait_procs(processes, timeout=END_TIMEOUT)
        for process in left:
            process.kill()
    assert left == []


def test_what_one_server_has_computed_the_other_copies(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until_compared(servers.tracker)
    ask.main([*servers.endpoints.values(), "--rows", "40"])
    first, second = re.findall(r"(\d+) of (\d+) tokens reused", capsys.readouterr().out)
    assert first[0] == "0"
    assert int(second[0]) > 0.9 * int(second[1])

"""Two `vllm serve` and a tracker, without xinference: the example, as in its README."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import xoscar

from examples.plain_vllm import ask
from examples.processes import answers, free_port, start
from tests.e2e.conftest import ROOT, wait_for_engine, wait_until
from xinference_xavier.protocol.tracker import tracker_uid

pytestmark = pytest.mark.long

HOST = "127.0.0.1"
SCRIPT = ROOT / "examples" / "plain_vllm" / "serve.sh"
ARGUMENTS = "--block-size 128 --dtype float32 --enforce-eager --max-model-len 4096"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
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
    script = start([SCRIPT, model_folder, *ARGUMENTS.split()], log, environment)
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


def replicas(tracker: str) -> list[dict[str, Any]]:
    """What the tracker knows of each."""

    async def ask() -> Any:
        return await (await xoscar.actor_ref(address=tracker, uid=tracker_uid("plain"))).status()

    groups = asyncio.run(ask())["namespaces"].values()
    return [replica for group in groups for replica in group["replicas"]]


def serve(tracker: str) -> bool:
    return [replica["serves"] for replica in replicas(tracker)] == [True, True]


def compared(tracker: str) -> bool:
    counts = [replica["stats"]["comparison"]["compared"] for replica in replicas(tracker)]
    return counts == [1, 1]


def test_what_one_server_has_computed_the_other_copies(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """They compare themselves before anybody asks them anything."""
    wait_until(lambda: compared(servers.tracker), "they are compared")
    ask.main([*servers.endpoints.values(), "--rows", "40"])
    first, second = re.findall(r"(\d+) of (\d+) tokens reused", capsys.readouterr().out)
    assert first[0] == "0"
    assert int(second[0]) > 0.9 * int(second[1])

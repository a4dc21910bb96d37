"""Two `vllm serve`, a tracker and a proxy, without xinference: the example, as in its README."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import xoscar

from examples.documents import document
from examples.local_cluster import answers, free_port
from examples.plain_vllm import ask
from tests.e2e.conftest import ROOT, wait_for_engine, wait_until
from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES, body_of, route_of
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.replica.load_reporter import INTERVAL
from xinference_xavier.routing.expected import GRACE

pytestmark = pytest.mark.long

HOST = "127.0.0.1"
SCRIPT = ROOT / "examples" / "plain_vllm" / "serve.sh"
ARGUMENTS = "--block-size 128 --dtype float32 --enforce-eager --max-model-len 4096"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
END_TIMEOUT = 120.0
PROGRAM = Path(sys.executable).parent / "xinference-xavier"


class Servers(NamedTuple):
    tracker: str
    endpoints: dict[str, str]
    """By name."""


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
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        script = subprocess.Popen(
            [SCRIPT, model_folder, *ARGUMENTS.split()],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
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


@pytest.fixture(scope="module")
def proxy(servers: Servers) -> Iterator[httpx.Client]:
    port = free_port(HOST)
    replicas = [f"--replica={name}={url}" for name, url in servers.endpoints.items()]
    words = ["--tracker", servers.tracker, "--model-uid", "plain", "--port", str(port), *replicas]
    process = subprocess.Popen([PROGRAM, "proxy", *words], stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=END_TIMEOUT) as client:
            wait_until(lambda: answers(f"http://{HOST}:{port}/health"), "the proxy answers")
            wait_until(lambda: report(client)["loads"].keys() == servers.endpoints.keys(), "loads")
            yield client
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=END_TIMEOUT)
        assert (process.returncode, said) == (0, "")
    finally:
        process.kill()
        process.wait()


def report(proxy: httpx.Client) -> dict[str, Any]:
    routing: dict[str, Any] = proxy.get("/xavier").raise_for_status().json()
    return routing


def backlog(proxy: httpx.Client, replica: str) -> float:
    """Seconds, as the proxy expects."""
    return float(report(proxy)["loads"][replica]["backlog_s"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_questions_about_a_document_go_to_the_server_that_computed_it(
    proxy: httpx.Client, path: str
) -> None:
    model = proxy.get("/v1/models").json()["data"][0]["id"]
    text = document(7 + len(path), 40)

    def put(number: int) -> httpx.Response:
        body = body_of(path, model, f"{text} question {number}")
        return proxy.post(path, json=body).raise_for_status()

    replica, _ = route_of(put(0))
    # What the proxy expects for having sent it is over: now it must know the document by the ids in
    # the server's report.
    time.sleep(INTERVAL + GRACE + backlog(proxy, replica))
    asked = []
    for number in range(1, 5):
        wait_until(lambda: backlog(proxy, replica) == 0, "nothing keeps it from answering first")
        asked.append(put(number))
    assert [route_of(answer) for answer in asked] == [(replica, "local")] * 4
    usage = [answer.json()["usage"] for answer in asked]
    assert min(each["prompt_tokens_details"]["cached_tokens"] for each in usage) > 1000


@pytest.mark.parametrize("stream", [True, False])
def test_every_text_route_is_routed(proxy: httpx.Client, stream: bool) -> None:
    model = proxy.get("/v1/models").json()["data"][0]["id"]
    for path in TEXT_ROUTES:
        answer = proxy.post(path, json=body_of(path, model, "Hello", 4, stream=stream))
        assert route_of(answer.raise_for_status())[1] != "in turn", path
    assert report(proxy)["unrouted"] == 0

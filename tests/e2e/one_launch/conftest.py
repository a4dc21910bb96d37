"""One launch, with the command line, for the tests of sharing, routing, named prefixes, and of what
operators do."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.local_cluster import Completion, LocalCluster
from tests.e2e.asking import CHUNK, question
from tests.e2e.conftest import ARGUMENTS, can_fetch, wait_until
from xinference_xavier.client import XavierClient

UID = "shared"


@pytest.fixture(scope="session")
def model(cluster: LocalCluster) -> Iterator[LocalCluster]:
    launch_by_command_line(cluster)
    assert can_fetch(cluster, UID, 2), "a launch is ready when its replicas can fetch"
    yield cluster
    if any(model["id"] == UID for model in cluster.call("GET", "/v1/models")["data"]):
        cluster.terminate(UID)


def launch_by_command_line(cluster: LocalCluster) -> None:
    """Launch with the command line, as the README does; other modules use other ways."""
    options = {
        "endpoint": cluster.endpoint,
        "model-name": "small",
        "model-uid": UID,
        "model-engine": "vLLM",
        "model-format": "pytorch",
        "size-in-billions": "1",
        "quantization": "none",
        "replica": "2",
        "enforce_eager": "true",
        "tensor_parallel_size": "1",  # without a GPU, the command line would make it 0
        "request_limits": "2",
        "xavier_queue": "20",
        "xavier_drain": "90",  # answers end in time however busy the machine is
        "xavier_transport": "tests.faults:ScriptedSharedMemory",
        **{name: str(value) for name, value in ARGUMENTS.items()},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = Path(sys.executable).parent / "xinference"
    subprocess.run([program, "launch", *words], check=True, capture_output=True)
    cluster.wait_ready(UID, 2)


@pytest.fixture
def empty_pools(model: LocalCluster) -> None:
    """Tests count what replicas hold; what other tests have left would be evicted meanwhile."""
    with XavierClient(model.endpoint) as client:
        client.flush(UID)
    wait_until(
        lambda: not any(each["holdings"] for each in replicas(model).values()),
        "the tracker knows that the pools are empty",
    )


def replicas(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    return cluster.members(UID)


def ask(cluster: LocalCluster, text: str, **options: Any) -> tuple[str, Completion]:
    """The incarnation of the replica that answered, and its answer."""
    before = replicas(cluster)
    answer = cluster.complete(UID, text, **options)
    answered: list[str] = []

    def one_more_finished() -> bool:
        answered[:] = [
            incarnation
            for incarnation, replica in replicas(cluster).items()
            if replica["requests"] > before[incarnation]["requests"]
        ]
        return bool(answered)

    wait_until(one_more_finished, "a replica has counted the request")
    assert len(answered) == 1
    return answered[0], answer


def compute(cluster: LocalCluster, text: str, **options: Any) -> tuple[str, Completion]:
    """Have one replica compute `text`: its incarnation, once the chunks are published, and its
    answer."""
    before = replicas(cluster)
    replica, answer = ask(cluster, text, **options)
    held = before[replica]["holdings"] + answer.prompt_tokens // CHUNK
    wait_until(
        lambda: replicas(cluster)[replica]["holdings"] >= held,
        f"{replica} has published {held} chunks",
    )
    return replica, answer


def share(cluster: LocalCluster, seed: int) -> tuple[str, str, Completion]:
    """Have one replica compute a document, then ask the other: (donor, consumer, answer)."""
    donor, _ = compute(cluster, question(seed))
    consumer, answer = ask(cluster, question(seed))
    assert consumer != donor, "xinference sends requests to the replicas in turn"
    return donor, consumer, answer

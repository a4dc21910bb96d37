"""One launch, with the command line, for the tests of sharing, routing and named prefixes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.local_cluster import LocalCluster
from tests.e2e.conftest import ARGUMENTS, can_fetch

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
        **{name: str(value) for name, value in ARGUMENTS.items()},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = Path(sys.executable).parent / "xinference"
    subprocess.run([program, "launch", *words], check=True, capture_output=True)
    cluster.wait_ready(UID, 2)

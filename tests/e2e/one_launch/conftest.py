"""One launch, with the command line, for the tests of sharing, routing, named prefixes, and of what
operators do."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.local_cluster import LocalCluster
from tests.e2e.model import ARGUMENTS, Model, wait_until
from xinference_xavier.client import XavierClient

UID = "shared"


@pytest.fixture(scope="session")
def model(cluster: LocalCluster) -> Iterator[Model]:
    launch_by_command_line(cluster)
    model = Model(cluster, UID)
    assert model.is_sharing(), "a launch is ready when its replicas can fetch"
    yield model
    if not model.is_gone():
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
        "xavier_transport": "tests.faults:ScriptedGloo",
        **{name: str(value) for name, value in ARGUMENTS.items()},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = Path(sys.executable).parent / "xinference"
    subprocess.run([program, "launch", *words], check=True, capture_output=True)
    cluster.wait_ready(UID, 2)


@pytest.fixture
def empty_pools(model: Model) -> None:
    """Tests count what replicas hold; what other tests have left would be evicted meanwhile."""
    with XavierClient(model.endpoint) as client:
        client.flush(UID)
    wait_until(
        lambda: not any(each["holdings"] for each in model.replicas().values()),
        "the tracker knows that the pools are empty",
    )

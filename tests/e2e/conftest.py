"""One xinference for all end-to-end tests; each module launches and terminates its own models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.local_cluster import LAUNCH_TIMEOUT, ClusterError, LocalCluster
from examples.processes import until
from tests.faults import SCRIPT, Fault
from tests.harness.asynchronous import PLUGINS
from tests.harness.clusters import SeparateCluster
from tests.harness.remote import PATIENCE

ROOT = Path(__file__).parents[2]
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",  # in bfloat16, rounding decides a random model's near ties
    "max_model_len": 16384,
    "block_size": 128,
    "enable_xavier": True,
    "xavier_routing": "off",  # tests count on replicas that answer in turn
    "xavier_pool_bytes": "512MiB",
    "xavier_min_fetch_tokens": 256,  # fetch however busy the machine is
}
FETCH_TIMEOUT = 6.0
"""Seconds: a default of the cluster."""
SEPARATE_UID = "separate"
REPLICAS = (f"{SEPARATE_UID}-rep0", f"{SEPARATE_UID}-rep1")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll xinference, but not so often that polling keeps it busy."""
    assert until(condition, PATIENCE, interval=0.2), f"never came true: {what}"


def wait_for_engine(condition: Callable[[], bool], what: str) -> None:
    """The same, with time for an engine or a supervisor to start."""
    assert until(condition, LAUNCH_TIMEOUT, interval=0.5), f"never came true: {what}"


def can_fetch(cluster: LocalCluster, model_uid: str, count: int) -> bool:
    """Whether exactly `count` replicas have joined, all with a transfer process."""
    try:
        replicas = cluster.xavier(model_uid)["replicas"]
    except ClusterError:  # no tracker, or no supervisor to ask for it
        return False
    ready = [each["serves"] and each["transfer_pid"] and not each["stale"] for each in replicas]
    return len(ready) == count and all(ready)


@contextmanager
def launched(
    cluster: LocalCluster, uid: str, *, model: str = "small", **arguments: Any
) -> Iterator[None]:
    """Two replicas of a registered model that can fetch from each other."""
    cluster.launch(model, uid, **ARGUMENTS | arguments)
    try:
        wait_for_engine(lambda: can_fetch(cluster, uid, 2), "both replicas can fetch")
        yield
    finally:
        cluster.terminate(uid)


@pytest.fixture(scope="session")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that tells `ScriptedSharedMemory` which fault to inject."""
    file = tmp_path_factory.mktemp("fault") / "mode"
    file.write_text(Fault.NONE)
    return file


@pytest.fixture(scope="session")
def cluster(model_folder: Path, fault: Path) -> Iterator[LocalCluster]:
    """Listens on all addresses, to show that `0.0.0.0` works as xinference's host. Its engines
    schedule asynchronously, as on GPUs; those of `separate_cluster` one step at a time."""
    environment = {
        "PYTHONPATH": f"{ROOT}:{PLUGINS}",
        SCRIPT: str(fault),
        "XINFERENCE_DISABLE_METRICS": "0",
        "XINFERENCE_TRUST_REMOTE_CODE": "1",  # for a model whose code lacks a module
        "XINFERENCE_XAVIER_FETCH_TIMEOUT": f"{FETCH_TIMEOUT:g}",
    }
    log = ROOT / "build" / "test-cluster.log"
    with LocalCluster(log, host="0.0.0.0", environment=environment) as cluster:
        cluster.register(model_folder, "small")
        yield cluster


@pytest.fixture(scope="session")
def separate_cluster(model_folder: Path) -> Iterator[SeparateCluster]:
    """A supervisor and a worker as separate programs, and two replicas of `SEPARATE_UID`."""
    log = ROOT / "build" / "test-separate.log"
    with SeparateCluster(log, environment={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.register(model_folder, "small")
        arguments = ARGUMENTS | {"max_model_len": 4096, "xavier_pool_bytes": "1GiB"}
        cluster.launch("small", SEPARATE_UID, replica=2, **arguments)
        yield cluster

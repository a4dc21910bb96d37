"""One xinference for all end-to-end tests; each module launches and terminates its own models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.local_cluster import LocalCluster
from tests.e2e.model import Model
from tests.faults import SCRIPT, Fault
from tests.harness.asynchronous import PLUGINS
from tests.harness.clusters import SeparateCluster

ROOT = Path(__file__).parents[2]
FETCH_TIMEOUT = 6.0
"""Seconds: a default of the cluster."""


@contextmanager
def launched(
    cluster: LocalCluster, uid: str, name: str = "small", **arguments: Any
) -> Iterator[Model]:
    model = Model(cluster, uid)
    model.launch(name, **arguments)
    try:
        yield model
    finally:
        cluster.terminate(uid)


@pytest.fixture(scope="session")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that tells `ScriptedGloo` which fault to inject."""
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
    """A supervisor and a worker as separate programs."""
    log = ROOT / "build" / "test-separate.log"
    with SeparateCluster(log, environment={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.register(model_folder, "small")
        yield cluster


@pytest.fixture(scope="session")
def separate_model(separate_cluster: SeparateCluster) -> Model:
    model = Model(separate_cluster, "separate")
    model.launch(max_model_len=4096, xavier_pool_bytes="1GiB")
    return model


@pytest.fixture
def separate(separate_model: Model) -> Model:
    """The model of that cluster, after all that tests have done to it."""
    separate_model.wait_until_sharing()
    return separate_model

"""One xinference for all end-to-end tests; its models come and go with the modules."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.local_cluster import LocalCluster
from tests import replica_process
from tests.faults import SCRIPT, Fault

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "dtype": "float32",  # in bfloat16 a random model's near ties flip by rounding alone
    "max_model_len": 16384,
    "block_size": 128,
    "enable_xavier": True,
    "xavier_pool_bytes": "512MiB",
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Ask xinference again and again, but not so often that it is busy with that."""
    replica_process.wait_until(condition, what, interval=0.2)


@pytest.fixture(scope="session")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what goes wrong with `ScriptedGloo`."""
    file = tmp_path_factory.mktemp("fault") / "mode"
    file.write_text(Fault.NONE)
    return file


@pytest.fixture(scope="session")
def cluster(model_folder: Path, fault: Path) -> Iterator[LocalCluster]:
    """Listens on all addresses: `0.0.0.0` as xinference's host just works."""
    environment = {"PYTHONPATH": str(ROOT), SCRIPT: str(fault)}
    log = ROOT / "build" / "test-cluster.log"
    with LocalCluster(log, host="0.0.0.0", environment=environment) as cluster:
        cluster.register(model_folder, "small")
        yield cluster

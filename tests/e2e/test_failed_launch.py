"""Level 3: launches that fail midway. The user reads why, nothing stays behind, and the same uid
can be launched at once.

The second replica's process is suspended from its start until the first one has created its region.
Changes to the model's folder in between affect only the second one.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from examples.local_cluster import LAUNCH_TIMEOUT, ClusterError, LocalCluster
from examples.processes import until
from tests.e2e.model import Model, wait_for_engine, wait_until
from tests.harness import processes

pytestmark = pytest.mark.long

SMALL = {"max_model_len": 4096, "xavier_pool_bytes": "128MiB"}
REGION_SOCKET = "@xinference-xavier-"
ENDED = 300.0
"""Seconds for a launch's processes to end: a loading engine ends only when it has loaded."""


@pytest.fixture(scope="module")
def folder(
    cluster: LocalCluster, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A copy of the model that tests may damage, registered as `fragile`."""
    folder = tmp_path_factory.mktemp("fragile") / "model"
    shutil.copytree(model_folder, folder)
    cluster.register(folder, "fragile")
    return folder


@pytest.fixture
def model(cluster: LocalCluster, folder: Path) -> Model:
    return Model(cluster, "failing")


@contextlib.contextmanager
def without_weights(folder: Path) -> Iterator[None]:
    weights, aside = folder / "model.safetensors", folder.parent / "aside"
    weights.rename(aside)
    try:
        yield
    finally:
        aside.rename(weights)


@contextlib.contextmanager
def configured(folder: Path, **changes: object) -> Iterator[None]:
    file = folder / "config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | changes))
    try:
        yield
    finally:
        file.write_text(before)


@contextlib.contextmanager
def too_large_for_memory(folder: Path) -> Iterator[None]:
    """Its first layer alone takes terabytes."""
    with configured(folder, intermediate_size=1 << 30):
        yield


@contextlib.contextmanager
def in_need_of_a_module(folder: Path) -> Iterator[None]:
    """Its configuration is code that imports a missing module."""
    code = folder / "configuration_needy.py"
    code.write_text("import xavier_no_such_module\n\nclass NeedyConfig:\n    pass\n")
    try:
        with configured(
            folder, model_type="needy", auto_map={"AutoConfig": "configuration_needy.NeedyConfig"}
        ):
            yield
    finally:
        code.unlink()


def regions(cluster: LocalCluster) -> set[str]:
    """The sockets that hand out the regions of the cluster's engines."""
    found = set()
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {str(each.laddr) for each in process.net_connections("unix")}
    return {name for name in found if REGION_SOCKET in name}


def left_memory() -> set[str]:
    """Files in /dev/shm that no process has mapped, not even one of another run."""
    mapped = ""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            mapped += Path(f"/proc/{process.pid}/maps").read_text()
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" not in mapped}


@contextlib.contextmanager
def nothing_stays(model: Model) -> Iterator[Callable[[], None]]:
    """No process, port, region, shared memory, model or tracker of the block outlives it. It gets a
    call that waits until one of its replicas has created its region."""
    cluster = model.cluster
    before, memory, others = set(cluster.processes()), left_memory(), regions(cluster)

    def wait_for_a_region() -> None:
        wait_for_engine(lambda: regions(cluster) > others, "a replica has created its region")

    yield wait_for_a_region
    processes.wait_gone(set(cluster.processes()) - before, ENDED)  # and their ports with them
    wait_until(
        lambda: regions(cluster) <= others and left_memory() <= memory, "no shared memory is left"
    )
    assert model.is_gone()


@contextlib.contextmanager
def launching(model: Model, replica: int, **more: object) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(model.launch, "fragile", replica=replica, **SMALL, **more)


def appeared(replica: str) -> psutil.Process:
    def exists() -> bool:
        with contextlib.suppress(LookupError):
            return bool(processes.model_process(replica))
        return False

    # Seen at once: a tenth of a second later it reads the model's configuration.
    assert until(exists, LAUNCH_TIMEOUT, interval=0.005), f"{replica} never had a process"
    return processes.model_process(replica)


@pytest.mark.parametrize(
    ("damaged", "cause"),
    [
        (without_weights, "Cannot find any model weights"),
        (too_large_for_memory, "allocate"),
        (in_need_of_a_module, "xavier_no_such_module"),
    ],
)
def test_a_second_replica_that_cannot_load_takes_the_first_along(
    model: Model,
    folder: Path,
    damaged: Callable[[Path], contextlib.AbstractContextManager[None]],
    cause: str,
) -> None:
    """Its weights, memory or a module is missing: the user reads which."""
    with (
        nothing_stays(model) as wait_for_a_region,
        contextlib.ExitStack() as damage,
        launching(model, 2, trust_remote_code=True) as launch,
    ):
        with processes.frozen([appeared(model.second)]):
            wait_for_a_region()
            damage.enter_context(damaged(folder))
        with pytest.raises(ClusterError) as failure:
            launch.result()
    assert cause in str(failure.value)


def test_a_launch_that_hangs_and_is_cancelled_leaves_nothing(model: Model) -> None:
    """It hangs between the creation of a region and the readiness of its engine. Neither xinference
    nor vLLM has a time limit there, so only a cancellation ends it."""
    with (
        nothing_stays(model) as wait_for_a_region,
        launching(model, 2) as launch,
        processes.frozen([appeared(model.second)]),
    ):
        wait_for_a_region()
        model.cluster.call("POST", f"/v1/models/{model.uid}/cancel")
        with pytest.raises(ClusterError):
            launch.result()


def test_an_engine_killed_before_it_is_ready_leaves_nothing_and_the_uid_is_free(
    model: Model,
) -> None:
    with nothing_stays(model) as wait_for_a_region:
        with launching(model, 1) as launch:
            wait_for_a_region()
            processes.kill(processes.of_replica(model.first).engine)
            with pytest.raises(ClusterError, match="Engine core"):
                launch.result()
        model.launch("fragile", replica=1, **SMALL)
        model.cluster.terminate(model.uid)

"""A worker is asked only while it has a job, and reports each job once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.engine.caches import cell_bytes, kv_caches, pages_of
from tests.engine.vllm_scheduler import engine_config
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.worker import HostWorker, OnlyLoads
from xinference_xavier.pool.region import Region

CACHES = kv_caches([[64]])


class Watched(HostWorker):
    def __init__(self, region: Region) -> None:
        super().__init__(CACHES, region, 1, 0)
        self.asked = 0
        self.waited = 0

    def get_finished(self) -> list[TransferResult]:
        self.asked += 1
        return super().get_finished()

    def await_finished(self, seconds: float) -> bool:
        self.waited += 1
        return super().await_finished(60.0)


class Steps:
    """Steps of a worker, as vLLM's model runners make them."""

    def __init__(self, connector: XavierConnector, worker: Watched) -> None:
        self.connector, self.worker = connector, worker

    def __call__(self, metadata: OffloadingConnectorMetadata) -> tuple[set[str], set[int]]:
        """The requests that have been loaded, and the jobs that are completed."""
        connector = self.connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(Mock())
        connector.wait_for_save()  # type: ignore[no-untyped-call]
        self.worker.wait({1, 2})
        _, loaded = connector.get_finished(set())
        completed = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return loaded, set(completed.completed_jobs if completed else ())


@pytest.fixture
def step(model_folder: Path, cache_config: KVCacheConfig) -> Iterator[Steps]:
    connector = XavierConnector(engine_config(model_folder), KVConnectorRole.WORKER, cache_config)
    assert connector.connector_worker is not None
    region = Region.create(2, cell_bytes(CACHES, 1))
    connector.connector_worker.worker = worker = Watched(region)
    yield Steps(connector, worker)
    connector.shutdown()
    region.close()


def nothing() -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata({}, {})


def block(number: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec([number], group_sizes=[1], block_indices=[0])


STORE = {1: TransferJob("a", block(3), CPULoadStoreSpec([0]))}
LOAD = {2: TransferJob("b", CPULoadStoreSpec([0]), block(5))}


def test_a_worker_without_jobs_is_not_asked(step: Steps) -> None:
    for _ in range(3):
        assert step(nothing()) == (set(), set())
    assert not step.worker.asked


def test_a_store_begins_in_the_next_step_and_is_reported_once(step: Steps) -> None:
    assert step(OffloadingConnectorMetadata({}, dict(STORE))) == (set(), set())
    assert step(nothing()) == (set(), {1})
    asked = step.worker.asked
    assert step(nothing()) == (set(), set())
    assert step.worker.asked == asked


def test_a_store_that_vllm_flushes_is_reported_in_its_step(step: Steps) -> None:
    """vLLM takes it out of the metadata, since its request is preempted."""
    flushed = OffloadingConnectorMetadata({}, dict(STORE), {1})
    assert step(flushed) == (set(), {1})


def test_what_was_stored_is_loaded(step: Steps) -> None:
    step(OffloadingConnectorMetadata({}, dict(STORE)))
    step(nothing())
    assert step(OffloadingConnectorMetadata(dict(LOAD), {})) == ({"b"}, {2})
    assert pages_of(CACHES, 0, 5) == pages_of(CACHES, 0, 3)


def test_a_worker_waits_in_steps_that_have_nothing_but_loads(step: Steps) -> None:
    step(OffloadingConnectorMetadata(dict(LOAD), {}))
    assert not step.worker.waited
    step(OnlyLoads(dict(LOAD), {}))
    assert step.worker.waited == 1
    step(OnlyLoads({}, {}))
    assert step.worker.waited == 1

"""The connector in vLLM's workers.

A worker asks it several times in each step, and in each layer. In most steps no job runs, and
vLLM's own methods take their time to find that out.

Belongs to the worker's thread.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from xinference_xavier.engine.waiting import Arrivals
from xinference_xavier.engine.worker.cpu import HostWorker

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

_MAX_LOAD_WAIT = 0.01
"""Seconds that an idle engine waits for its loads, at a time. Otherwise it would poll a thousand
times a second and hold Python's lock a third of the time, which the copy threads need."""


@dataclass
class OnlyLoads(OffloadingConnectorMetadata):
    """The metadata of a step in which the engine only waits for loads."""


class WorkerSide(OffloadingConnector):
    """`_arrivals` are those of the worker's engine; None if it never waits."""

    _arrivals: Arrivals | None

    def __init__(self, *args: Any) -> None:
        self._jobs = set[int]()  # that this worker has not reported as completed
        super().__init__(*args)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this at the beginning of each step, before it removes or submits a job."""
        assert isinstance(kv_connector_metadata, OffloadingConnectorMetadata)
        self._jobs.update(kv_connector_metadata.load_jobs, kv_connector_metadata.store_jobs)
        if self._jobs:
            super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._jobs:
            super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if not self._jobs:
            return set(), set()
        if isinstance(self._connector_metadata, OnlyLoads):
            assert self.connector_worker is not None
            assert self._arrivals is not None, "then no step is one"
            worker = self.connector_worker.worker
            if isinstance(worker, HostWorker):
                self._arrivals.wait(worker.await_finished, _MAX_LOAD_WAIT)
        return super().get_finished(finished_req_ids)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        if not self._jobs:
            return None
        completed = super().build_connector_worker_meta()
        if completed is not None:
            self._jobs.difference_update(completed.completed_jobs)
        return completed

    def has_connector_metadata(self) -> bool:
        """vLLM asks in each layer: there is nothing to load or to save for a layer alone."""
        return False

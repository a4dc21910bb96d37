"""Our spec with a worker whose copies wait at a gate: see `gates`."""

import threading
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult

from tests.e2e.gates import Gate, is_closed, wait_for
from xinference_xavier.engine import spec
from xinference_xavier.engine.worker_side import HostWorker, _Job


class _GatedWorker(HostWorker):
    def _copy(self, job: _Job) -> int:
        wait_for(Gate.COPIES, threading.Event())
        return super()._copy(job)


class _GatedCard:
    """Wraps vLLM's worker for CUDA. Its streams cannot be held up, so completed copies are not
    reported before the gate opens."""

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def get_finished(self) -> list[TransferResult]:
        return [] if is_closed(Gate.COPIES) else self._worker.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        wait_for(Gate.COPIES, threading.Event())
        self._worker.wait(job_ids)


class GatedSpec(spec.XavierSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = super().get_worker(kv_caches)
        if not isinstance(worker, HostWorker):
            return _GatedCard(worker)  # type: ignore[return-value]
        worker.__class__ = _GatedWorker  # its thread has nothing to copy yet
        return worker

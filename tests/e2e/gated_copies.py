"""Our spec, whose worker's copies wait at a gate: see `gates`."""

from __future__ import annotations

import threading

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker

from tests.e2e.gates import Gate, wait_for
from xinference_xavier.engine import host_worker, spec


class _GatedWorker(host_worker.HostWorker):
    def _copy(self, job: host_worker._Job) -> int:
        wait_for(Gate.COPIES, threading.Event())
        return super()._copy(job)


class GatedSpec(spec.XavierSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = super().get_worker(kv_caches)
        worker.__class__ = _GatedWorker  # its thread has nothing to copy yet
        return worker

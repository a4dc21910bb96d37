"""The supervisor's part of routing."""

from __future__ import annotations

from typing import Any


async def xavier_replica(supervisor: Any, replica: str) -> Any:
    """A reference to the model actor of one replica; becomes a SupervisorActor's method."""
    worker = supervisor._replica_model_uid_to_worker[replica]
    if isinstance(worker, (list, tuple)):  # a replica of several workers
        worker = worker[0]
    return await worker.get_model(model_uid=replica)

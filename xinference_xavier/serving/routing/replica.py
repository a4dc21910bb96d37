"""The supervisor's part of routing."""

from __future__ import annotations

from typing import Any

from xinference_xavier.protocol.startup_errors import without_rank


async def xavier_replica(supervisor: Any, replica: str) -> Any:
    """A reference to the model actor of one replica; becomes a SupervisorActor's method."""
    replica = without_rank(replica)
    worker = supervisor._replica_model_uid_to_worker[replica]
    if isinstance(worker, (list, tuple)):  # a replica of several workers
        worker = worker[0]
    return await worker.get_model(model_uid=replica)

"""The supervisor's part of routing."""

from __future__ import annotations

import re
from typing import Any

_ENGINE = re.compile(r"_dp\d+$")
"""With data parallelism each engine of a replica has a name of its own."""


async def xavier_replica(supervisor: Any, replica: str) -> Any:
    """A reference to the model actor of one replica; becomes a SupervisorActor's method."""
    replica = _ENGINE.sub("", replica)
    worker = supervisor._replica_model_uid_to_worker[replica]
    if isinstance(worker, (list, tuple)):  # a replica of several workers
        worker = worker[0]
    return await worker.get_model(model_uid=replica)

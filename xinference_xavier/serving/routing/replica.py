"""The supervisor's part of routing."""

from __future__ import annotations

import functools
from typing import Any

from xinference_xavier.errors import ReplicaNotServingError
from xinference_xavier.protocol.startup_errors import without_rank
from xinference_xavier.serving.launch import Method


async def xavier_replica(supervisor: Any, replica: str) -> Any:
    """A reference to the model actor of one replica. Raises ReplicaNotServingError."""
    replica = without_rank(replica)
    try:
        worker = supervisor._replica_model_uid_to_worker[replica]
        if isinstance(worker, (list, tuple)):  # a replica of several workers
            worker = worker[0]
        return await worker.get_model(model_uid=replica)
    except Exception as error:
        raise ReplicaNotServingError(f"replica {replica} takes no requests ({error!r})") from error


def finding_replicas(get_model: Method) -> Method:
    """Makes `get_model(replica, xavier_replica=True)` do what `xavier_replica` does. While
    xinference 4.1 relaunches its supervisor, it lets only some methods of its own through."""

    @functools.wraps(get_model)
    async def find(supervisor: Any, model_uid: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("xavier_replica", False):
            return await xavier_replica(supervisor, model_uid)
        return await get_model(supervisor, model_uid, *args, **kwargs)

    return find

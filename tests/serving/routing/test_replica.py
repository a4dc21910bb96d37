"""The supervisor names the model actor of one replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from xinference_xavier.errors import ReplicaNotServingError
from xinference_xavier.serving.launch.supervisor import finding_replicas, xavier_replica


class Worker:
    async def get_model(self, model_uid: str) -> str:
        return f"model actor of {model_uid}"


def supervisor(**workers: Any) -> Any:
    routes = {name.replace("_", "-"): worker for name, worker in workers.items()}
    return SimpleNamespace(_replica_model_uid_to_worker=routes)


async def test_the_worker_of_the_replica_knows_its_model_actor() -> None:
    found = await xavier_replica(supervisor(m_rep0=None, m_rep1=Worker()), "m-rep1")
    assert found == "model actor of m-rep1"


async def test_a_replica_of_several_workers_is_reached_through_the_first() -> None:
    found = await xavier_replica(supervisor(m_rep0=(Worker(), None)), "m-rep0")
    assert found == "model actor of m-rep0"


async def test_with_data_parallelism_an_engine_is_reached_through_its_replica() -> None:
    found = await xavier_replica(supervisor(m_rep0=Worker()), "m-rep0_dp1")
    assert found == "model actor of m-rep0"


class Stopping:
    async def get_model(self, model_uid: str) -> str:
        raise RuntimeError(f"Model {model_uid} is in stopping state")


@pytest.mark.parametrize("workers", [{}, {"m_rep0": Stopping()}])
async def test_a_replica_that_ends_or_has_ended_takes_no_requests(workers: Any) -> None:
    with pytest.raises(ReplicaNotServingError, match="replica m-rep0 takes no requests"):
        await xavier_replica(supervisor(**workers), "m-rep0")


class Supervisor:
    """While xinference relaunches it, only `get_model` reaches it."""

    _replica_model_uid_to_worker: ClassVar[dict[str, Any]] = {"m-rep1": Worker()}

    @finding_replicas
    async def get_model(self, model_uid: str, **more: Any) -> Any:
        return model_uid, more


async def test_it_is_asked_by_a_method_of_xinferences_own() -> None:
    supervisor = Supervisor()
    found = await supervisor.get_model("m-rep1", xavier_replica=True)
    assert found == "model actor of m-rep1"
    assert await supervisor.get_model("m", other=1) == ("m", {"other": 1})

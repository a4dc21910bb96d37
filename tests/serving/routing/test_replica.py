"""The supervisor names the model actor of one replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xinference_xavier.serving.routing.replica import xavier_replica


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


async def test_a_replica_that_has_ended_is_unknown() -> None:
    with pytest.raises(KeyError):
        await xavier_replica(supervisor(), "m-rep0")

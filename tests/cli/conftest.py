"""A healthy pair of replicas behind an API, for all that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.api_process import ApiProcess
from tests.replica_process import ReplicaProcess, replicas


class Pair(NamedTuple):
    api: ApiProcess
    first: ReplicaProcess
    second: ReplicaProcess


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    api = ApiProcess()
    try:
        with replicas(api.address, {"first": "gloo", "second": "gloo"}) as (first, second):
            yield Pair(api, first, second)
    finally:
        api.kill()

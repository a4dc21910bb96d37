"""A healthy pair of replicas behind an API, for all tests that use the fixture `pair`."""

from __future__ import annotations

from typing import NamedTuple

from tests.api_process import ApiProcess
from tests.replica_process import ReplicaProcess


class Pair(NamedTuple):
    api: ApiProcess
    first: ReplicaProcess
    second: ReplicaProcess

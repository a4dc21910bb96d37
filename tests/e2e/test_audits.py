"""Under xinference an idle replica computes again what it has copied, and says so."""

import pytest

from examples.local_cluster import LocalCluster
from tests.e2e.conftest import launched, wait_for_engine
from xinference_xavier.engine.audits import AUDIT_SHARE

pytestmark = pytest.mark.long

UID = "audited"
CHUNK = 128
PROMPT = 8000
"""Tokens, about: a number is one token or two."""


def prompt(number: int) -> str:
    return " ".join(str(number * PROMPT + place) for place in range(PROMPT // 4))


def test_an_idle_replica_audits_what_it_has_copied(cluster: LocalCluster) -> None:
    with launched(cluster, UID):
        stats = [replica["comparison"] for replica in cluster.xavier(UID)["replicas"]]
        assert [each["compared"] for each in stats] == [1, 1], "their canaries were equal"
        number = 0
        while min(replica["hits"]["computed"] for replica in replicas(cluster)) < (
            CHUNK * AUDIT_SHARE
        ):
            cluster.complete(UID, prompt(number))
            number += 1
        before = sum(replica["hits"]["remote"] for replica in replicas(cluster))

        def audited() -> bool:
            """Both get the same prompts in turns, so the second one copies them."""
            nonlocal number
            number += 1
            for _ in range(2):
                cluster.complete(UID, prompt(number))
            return any(replica["comparison"]["audits"] for replica in replicas(cluster))

        wait_for_engine(audited, "an audit")
        assert sum(replica["hits"]["remote"] for replica in replicas(cluster)) > before
        assert [replica["comparison"]["failed_audits"] for replica in replicas(cluster)] == [0, 0]


def replicas(cluster: LocalCluster) -> list[dict[str, dict[str, int]]]:
    found: list[dict[str, dict[str, int]]] = cluster.xavier(UID)["replicas"]
    return found

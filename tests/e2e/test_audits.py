"""Under xinference an idle replica computes again what it has copied, and says so."""

import pytest

from examples.local_cluster import LocalCluster
from tests.e2e.conftest import launched
from tests.e2e.model import CHUNK, Model, wait_for_engine
from xinference_xavier.engine.audits import AUDIT_SHARE

pytestmark = pytest.mark.long

PROMPT = 8000
"""Tokens, about: a number is one token or two."""


def prompt(number: int) -> str:
    return " ".join(str(number * PROMPT + place) for place in range(PROMPT // 4))


def test_an_idle_replica_audits_what_it_has_copied(cluster: LocalCluster) -> None:
    with launched(cluster, "audited") as model:
        assert figures(model, "comparison", "compared") == [1, 1], "their canaries were equal"
        number = 0
        while min(figures(model, "hits", "computed")) < CHUNK * AUDIT_SHARE:
            model.complete(prompt(number))
            number += 1
        before = sum(figures(model, "hits", "remote"))

        def audited() -> bool:
            """Both get the same prompts in turns, so the second one copies them."""
            nonlocal number
            number += 1
            for _ in range(2):
                model.complete(prompt(number))
            return any(figures(model, "comparison", "audits"))

        wait_for_engine(audited, "an audit")
        assert sum(figures(model, "hits", "remote")) > before
        assert figures(model, "comparison", "failed_audits") == [0, 0]


def figures(model: Model, part: str, name: str) -> list[int]:
    return [replica[part][name] for replica in model.replicas().values()]

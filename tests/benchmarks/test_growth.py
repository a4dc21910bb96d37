"""One quantity grows at a time, and its cost is compared with the cost before."""

from __future__ import annotations

import pytest

from benchmarks import growth
from benchmarks.figures import figure
from tests.benchmarks.parts import shown


def test_one_quantity_grows_at_a_time() -> None:
    base, *others = growth.settings().values()
    for setting in others:
        grown = [new // old for new, old in zip(setting, base, strict=True)]
        assert sorted(grown) == [1, 1, growth.TIMES]


def test_the_page_shows_what_grew_and_how_its_cost_grew() -> None:
    costs = {name: [0.01] * 5 for name in growth.settings()} | {"tokens": [0.02] * 5}
    rates = {"publishes_per_s": figure([1e6] * 5), "lookups_per_s": figure([1e6] * 5)}
    halved = {name: figure([5e5] * 5) for name in rates}
    replicas = [{"keys_per_s": figure([1e6] * 5), "p50_ms": figure([3.0] * 5)}] * 2
    part = {
        "hits": growth.of_hits(growth.settings(), costs),
        "tracker": growth.of_keys(rates, halved) + growth.of_replicas(replicas, replicas),
    }
    assert [found["times"] for found in part["hits"]] == pytest.approx([2, 1, 1])
    assert [found["times"] for found in part["tracker"]] == pytest.approx([2, 2, 1, 1])
    text = shown(growth, part)
    assert "| tokens of the prompt | 400 | 4,000 | remote − local hit, ms | 10.00 " in text

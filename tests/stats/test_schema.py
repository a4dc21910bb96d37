"""The figures of sharing and routing: each observation, request and forecast counts once, and a
client reads the answers of older and newer servers."""

import ast
import inspect
import json
import math
import re
import textwrap
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.routing import router
from xinference_xavier.serving.ui import routes
from xinference_xavier.stats.answers import NamedPrefix
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import (
    CHOICES,
    HIT_SOURCES,
    AnswerSeconds,
    ComparisonStats,
    Counters,
    Decisions,
    DiskStats,
    Fetches,
    FetchSeconds,
    FetchStats,
    FirstTokens,
    Histogram,
    Hits,
    KnownLoad,
    ModelStatus,
    PoolStats,
    Predictions,
    PromptStats,
    ReplicaFetches,
    ReplicaStatus,
    RoutingStats,
    Totals,
    TrackerStats,
    WaitCounts,
)

REPLICA: dict[str, Any] = {"incarnation": "a", "address": "10.0.0.1:1", "namespace": "n"}
STATUS: dict[str, Any] = {"model_uid": "m", "enabled": True, "replicas": [], "totals": {}}


def status(**replica: Any) -> ModelStatus:
    return read(ModelStatus, STATUS | {"replicas": [REPLICA | replica]})


def test_before_the_first_request_nothing_was_reused() -> None:
    assert Hits().ratio == 0.0
    assert Hits(prefix_cache=1, local_pool=2, remote=3, computed=2).ratio == 0.75
    assert Hits(computed=9).ratio == 0.0


def test_most_tokens_came_from_one_source() -> None:
    assert Hits(prefix_cache=1, local_pool=2, remote=3, computed=2).main == "remote"
    assert Hits(local_pool=2, computed=2).main == "local_pool", "the nearer of two"


def test_fields_that_an_older_server_lacks_have_their_defaults() -> None:
    (replica,) = status().replicas
    assert replica.replica == "a", "it has no other name"
    assert read(Counters, {}) == Counters()
    assert (replica.hits, replica.requests, replica.bytes_received) == (Hits(), 0, 0)
    assert (replica.stale, replica.pool.rows, replica.prefill_tokens_per_s) == (False, 0, None)
    assert (replica.received_from, replica.fetching) == ({}, {})
    assert status().routing == RoutingStats(mode="")


def test_fields_that_only_a_newer_server_has_are_in_raw() -> None:
    answer = status(colour="red", hits={"remote": 5, "moon": 7})
    (replica,) = answer.replicas
    assert replica.hits == Hits(remote=5)
    assert replica.raw["colour"] == "red"
    assert answer.raw["replicas"][0]["hits"]["moon"] == 7


@pytest.mark.parametrize("name", ["incarnation", "address", "namespace"])
def test_fields_that_every_server_has_are_required(name: str) -> None:
    raw = {key: value for key, value in REPLICA.items() if key != name}
    with pytest.raises(KeyError):
        read(ModelStatus, STATUS | {"replicas": [raw]})


@pytest.mark.parametrize(
    "kind",
    [
        *(ModelStatus, ReplicaStatus, Totals, Hits, ReplicaFetches, FetchStats, Decisions),
        *(WaitCounts, PromptStats, PoolStats, ComparisonStats),
        *(TrackerStats, RoutingStats, KnownLoad, Predictions),
    ],
)
def test_every_field_is_documented_by_its_class_or_its_metric(kind: type[Any]) -> None:
    text = " ".join(each.__doc__ or "" for each in kind.__mro__)
    explained = {each.name for each in fields(kind) if "figure" in each.metadata}
    missing = {each.name for each in fields(kind) if f"`{each.name}`" not in text} - explained
    assert missing == set()


READ_BY_THE_PAGE = {
    "Histogram": Histogram, "Fetches": Fetches, "Counters": Counters, "Pool": PoolStats,
    "Disk": DiskStats, "Comparison": ComparisonStats, "Replica": ReplicaStatus,
    "FirstBytes": Predictions, "Load": KnownLoad, "RoutingReport": RoutingStats,
    "Prefix": NamedPrefix, "Report": ModelStatus,
}  # fmt: skip
"""What the interfaces of `report.d.ts` are in a report."""


@pytest.mark.parametrize("name", READ_BY_THE_PAGE)
def test_what_the_page_reads_is_in_a_report(name: str) -> None:
    script = (Path(routes.__file__).parent / "page" / "report.d.ts").read_text()
    (body,) = re.findall(rf"^interface {name}\b.*?\{{$(.*?)^\}}$", script, re.M | re.S)
    read_there = set(re.findall(r"^  (\w+)\??:", body, re.M))
    names_of_prefixes = {"prefixes"} if name == "Report" else set()
    assert read_there
    assert read_there <= {each.name for each in fields(READ_BY_THE_PAGE[name])} | names_of_prefixes


class Tens(Histogram):
    bounds = (10.0, 100.0)


def tens(values: list[int]) -> Tens:
    histogram = Tens()
    for value in values:
        histogram.observe(value)
    return histogram


@given(st.lists(st.integers(0, 1000)))
def test_every_observation_is_in_one_bucket(values: list[int]) -> None:
    histogram = tens(values)
    assert json.loads(json.dumps(asdict(histogram))) == {
        "counts": [
            sum(value <= 10 for value in values),
            sum(10 < value <= 100 for value in values),
            sum(value > 100 for value in values),
        ],
        "sum": sum(values),
    }


def test_quantiles_are_linear_within_a_bucket() -> None:
    """PromQL computes them alike, so that page, table and Grafana agree."""
    histogram = tens([5] * 5 + [50] * 4 + [500])
    assert [histogram.quantile(share) for share in (0.25, 0.5, 0.7, 0.9, 0.99, 1.0)] == [
        5.0, 10.0, 55.0, 100.0, 100.0, 100.0,
    ]  # fmt: skip
    assert tens([50]).quantile(0.5) == 55.0
    assert tens([]).quantile(0.5) is None


@given(st.lists(st.integers(0, 100), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_value_that_it_stands_for(
    values: list[int], share: float
) -> None:
    value = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    lower, upper = (0, 10) if value <= 10 else (10, 100)
    found = tens(values).quantile(share)
    assert found is not None
    assert lower <= found <= upper


@pytest.mark.parametrize("counts", [[], [1, 2], [1, 2, 3, 4]])
def test_a_histogram_with_other_buckets_is_empty(counts: list[int]) -> None:
    """It comes from another version, or from a peer with bad intentions."""
    assert read(Tens, {"counts": counts, "sum": 5.0}) == Tens()
    assert read(Tens, {"counts": [1, 2, 3], "sum": 5.0}).counts == [1, 2, 3]


def test_first_tokens_have_the_sources_of_hits() -> None:
    assert tuple(each.name for each in fields(FirstTokens)) == HIT_SOURCES


@pytest.mark.parametrize("kind", [FetchSeconds, AnswerSeconds])
def test_bounds_grow(kind: type[Histogram]) -> None:
    assert list(kind.bounds) == sorted(set(kind.bounds))


# -- routing ----------------------------------------------------------------------------------


def test_errors_of_forecasts_do_not_cancel_out() -> None:
    stats = RoutingStats()
    stats.answered("local", predicted=1.0, actual=3.0)
    stats.answered("local", predicted=4.0, actual=3.0)
    stats.answered("fetch", predicted=9.0, actual=9.0)
    local = stats.first_bytes["local"]
    assert (local.predicted.sum, local.actual.sum, local.error.sum) == (5.0, 6.0, 3.0)
    assert sum(local.error.counts) == 2
    assert sum(stats.first_bytes["fetch"].error.counts) == 1


def test_every_reason_of_a_choice_is_known() -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(router._reason)))
    returned = [each.value for each in ast.walk(source) if isinstance(each, ast.Return)]
    texts = {each.value for value in returned if value for each in ast.walk(value)
             if isinstance(each, ast.Constant) and isinstance(each.value, str)}  # fmt: skip
    assert texts == set(CHOICES)

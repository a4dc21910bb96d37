"""What the declared figures become: a report, the samples of a scrape, and what `status` prints."""

import io
import math
import random
from dataclasses import asdict
from importlib import metadata
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from xinference_xavier import __version__
from xinference_xavier.cli.tables import model_table
from xinference_xavier.errors import ROLLBACKS, NotSharing
from xinference_xavier.serving.metrics import FAMILIES, Labels, Samples, samples
from xinference_xavier.stats.report import read, report
from xinference_xavier.stats.schema import (
    CHOICES,
    HIT_SOURCES,
    AnswerSeconds,
    FetchSeconds,
    FetchStats,
    FirstTokens,
    ModelStatus,
    RoutingStats,
)

ROW_BYTES = 1 << 20
XINFERENCE = metadata.version("xinference")
WAITS = FirstTokens()
WAITS.remote.observe(0.3)
FETCHES = FetchStats()
for reason, seconds, size in ((None, 0.02, 100), (None, 0.3, 200), ("link", 1.0, 50)):
    FETCHES.ended(reason, seconds, size)
ROUTED = RoutingStats(
    **{"mode": "auto", "waiting": 31, "waited": 32, "waited_s": 33.5, "refused": 34, "moved": 35},
    **{"unrouted": 36, "failures": 37, "failed_prefills": 38},
)
ROUTED.sent("fetch", "gone")
ROUTED.answered("fetch", predicted=0.5, actual=3.0)
ROUTED.answered("made up", predicted=0.5, actual=3.0)
ROUTED.decodes.observe(1.0, 2.0)


def stats(**changes: Any) -> dict[str, Any]:
    """A replica's report: each of its figures has a value of its own."""
    return {
        "hits": METRICS["prompt_tokens_total"],
        "first_tokens": asdict(WAITS),
        "requests": 5,
        "bytes_received": 3 << 20,
        "prefill_tokens_per_s": 600.0,
        "seconds_saved": 7.5,
        "fetch_decisions": {
            "fetched": 11, "computed": 12, "slower_than_prefill": 13, "left_out": {"x": "link"},
        },
        "fetching": {"b": 2, "c": 1},
        "fetches": {
            "started": 3, "committed": 2, "rolled_back": {"link": 1},
            "by_transport": {"gloo": asdict(FETCHES)},
        },
        "comparison": {"differing": 14, "failed_audits": 15},
        "disk": {"state": "open", "limit_bytes": 16, "rows": 17, "failures": 18},
        "not_sharing": None,
        "pool": {
            "rows": 100, "ready": 50, "filling": 3, "pinned": 8, "quarantined": 2,
            "row_bytes": ROW_BYTES,
        },
        "mapped_bytes": 31,
        "refused_posts": 25,
        "scheduler_errors": 29,
        "transfer_restarts": 1,
        "tracker_failures": 30,
        **changes,
    }  # fmt: skip


METRICS: dict[str, Any] = {
    "prompt_tokens_total": {
        "prefix_cache": 1000, "local_pool": 200, "disk": 50, "remote": 3000, "computed": 4250,
    },
    "time_to_first_token_seconds": dict.fromkeys(HIT_SOURCES, (0, 0.0)) | {"remote": (1, 0.3)},
    "saved_seconds": 7.5,
    "requests_total": 5,
    "fetches_total": {("gloo", "committed", ""): 2, ("gloo", "rolled_back", "link"): 1},
    "fetch_duration_seconds": {("gloo", "committed"): (2, 0.32), ("gloo", "rolled_back"): (1, 1.0)},
    "received_bytes_total": {"gloo": 350},
    "prefill_tokens_per_second": 600.0,
    "scheduler_errors_total": 29,
    "backlog_refused_total": 25,
    "fetches_slower_than_prefill_total": 13,
    "fetch_decisions_total": {"fetched": 11, "computed": 12},
    "left_out_peers": 1,
    "pool_bytes": {
        "ready": 50 * ROW_BYTES, "filling": 3 * ROW_BYTES, "quarantined": 2 * ROW_BYTES,
        "free": 45 * ROW_BYTES,
    },
    "pool_pinned_bytes": 8 * ROW_BYTES,
    "mapped_bytes": 31,
    "differing_peers_total": 14,
    "failed_audits_total": 15,
    "disk_limit_bytes": 16,
    "disk_chunks": 17,
    "disk_failures_total": 18,
    "transfer_restarts_total": 1,
    "tracker_failures_total": 30,
    "published_chunks": 30,
    "sharing": {"": 1},
    "fetching_chunks": 3,
    "enabled": 1,
    "replicas": 1,
    "namespaces": 1,
    "named_prefixes": {"kept": 2, "computing": 0, "waiting": 0, "failed": 0},
    "tracker_dropped_chunks_total": 1234,
    "routing_choices_total": dict.fromkeys(CHOICES, 0) | {"fetch": 1},
    "unrouted_requests_total": 36,
    "routing_waiting_requests": 31,
    "routing_waits_total": 32,
    "routing_wait_seconds_total": 33.5,
    "routing_refused_total": 34,
    "routing_moved_total": 35,
    "routing_failed_prefills_total": 38,
    "routing_failures_total": 37,
    "routing": {"auto": 1},
    "routable_replicas": 1,
    "routed_requests_total": {("0", ""): 0, ("gone", ""): 1},
    "prefill_backlog_seconds": {("0", ""): 1.5},
    "routing_predicted_seconds": dict.fromkeys(CHOICES, (0, 0.0))
    | {"fetch": (1, 0.5), "decode": (1, 1.0)},
    "routing_actual_seconds": dict.fromkeys(CHOICES, (0, 0.0))
    | {"fetch": (1, 3.0), "decode": (1, 2.0)},
    "routing_prediction_error_seconds": dict.fromkeys(CHOICES, (0, 0.0))
    | {"fetch": (1, 2.5), "decode": (1, 1.0)},
    "replica_up": 1,
    "tracker_up": 1,
    "up": 1,
    "build_info": {(__version__, XINFERENCE, "0.32.0"): 1},
}  # fmt: skip
"""All metrics of one model with one replica, by the values of their own labels. A label's values
that nobody has made up are there from the start, the others never: Prometheus would miss the first
count of a series that begins with it. Of a histogram, count and sum."""
STATUS = {
    "prefix cache": "1,000",
    "local pool": "200",
    "disk": "50",
    "remote": "3,000",
    "computed": "4,250",
    "reused": "50%",
    "requests": "5",
    "received": "3.0 MiB",
    "fetches": "2",
    "rolled back": "1 link",
    "chunks": "30",
    "pool": "53% of 100.0 MiB",
}
"""The columns of `status`."""
ROUTING_LINE = (
    "Routing auto: 1 requests to gone, 36 in turn, 31 waiting, 34 refused, 35 sent again."
)


def test_each_figure_on_its_way_from_the_report_to_metrics_and_status() -> None:
    reported = report(status_of([member("m-rep0", stats(vllm="0.32.0"))], dropped=1234))
    routing = asdict(ROUTED) | {"loads": {"m-rep0": {"backlog_s": 1.5, "requests": 2}}}
    reported |= {"routing": routing, "prefix_states": {"kept": 2, "made up": 9}}
    found = samples({"m": reported}, up=True)
    assert {name: own_values(found[name]) for name in found} == METRICS

    out = io.StringIO()
    Console(file=out, width=200).print(model_table(read(ModelStatus, reported)))
    heads, row, *lines = (line.strip("│ ") for line in out.getvalue().splitlines()[1:-1])
    assert [each for each in heads.split("  ") if each] == ["replica", *STATUS]
    assert row.split() == ["m-rep0", *" ".join(STATUS.values()).split()]
    assert ROUTING_LINE in lines


def own_values(values: list[Any]) -> Any:
    """The values of a metric by labels, but for those of its model and replica."""
    owner = {"model_uid", "replica_index", "dp_rank", "worker_address"}
    if not any("worker_address" in labels for labels, _ in values):
        owner = {"model_uid"}
    shown = {
        tuple(value for name, value in labels.items() if name not in owner): (
            (value["count"], pytest.approx(value["sum"])) if isinstance(value, dict) else value
        )
        for labels, value in values
    }
    if set(shown) == {()}:
        return shown[()]
    return {key[0] if len(key) == 1 else key: value for key, value in shown.items()}


def member(name: str, figures: dict[str, Any], incarnation: str = "") -> dict[str, Any]:
    return {
        "incarnation": incarnation or f"incarnation of {name}",
        "address": "10.0.0.1:1",
        "replica": name,
        "holdings": 30,
        "sequence": 1,
        "stats": figures,
    }


def status_of(*namespaces: list[dict[str, Any]], **tracker: Any) -> dict[str, Any]:
    groups = {
        f"namespace {number}": {"revision": 1, "keys": 0, "replicas": replicas}
        for number, replicas in enumerate(namespaces)
    }
    return {"model_uid": "m", "enabled": True, "namespaces": groups, **tracker}


def scraped(*namespaces: list[dict[str, Any]], **tracker: Any) -> Samples:
    return samples({"m": report(status_of(*namespaces, **tracker))}, up=True)


def value(found: Samples, family: str, **labels: str) -> Any:
    values = [value for its, value in found[family] if its.items() >= labels.items()]
    assert len(values) == 1, f"{family}{labels}: {found[family]}"
    return values[0]


def replicas_of(found: Samples) -> list[str]:
    return [labels["replica_index"] for labels, _ in found["replica_up"]]


def fetched(*ended: tuple[str | None, float, int]) -> dict[str, Any]:
    figures = FetchStats()
    for reason, seconds, size in ended:
        figures.ended(reason, seconds, size)
    return stats(fetches={"by_transport": {"gloo": asdict(figures)}})


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    found = scraped([member("m-rep0", fetched((None, 0.05, 1), (None, 0.051, 1), (None, 99.0, 1)))])
    buckets = value(found, "fetch_duration_seconds", outcome="committed")
    assert (buckets[0.025], buckets[0.05], buckets[0.1], buckets[30.0]) == (0, 1, 2, 2)
    assert buckets[math.inf] == buckets["count"] == 3
    assert buckets["sum"] == pytest.approx(99.101)
    bounds = [bound for bound in buckets if isinstance(bound, float)]
    assert bounds == [*FetchSeconds.bounds, math.inf]


@pytest.mark.parametrize("reason", NotSharing)
def test_why_a_replica_does_not_share(reason: str) -> None:
    found = scraped([member("m-rep0", stats(not_sharing=reason)), member("m-rep1", stats())])
    assert value(found, "sharing", replica_index="0", reason=reason) == 0
    assert value(found, "sharing", replica_index="1", reason="") == 1


@pytest.mark.parametrize(("mode", "routes"), [("auto", 1), ("backlog", 1), ("off", 0), ("", 0)])
def test_figures_of_a_model_without_loads(mode: str, routes: int) -> None:
    namespaces = [[member(f"m-rep{number}", stats())] for number in range(2)]
    status = status_of(*namespaces, enabled=False)
    found = samples({"m": report(status) | {"routing": {"mode": mode}}}, up=True)
    assert value(found, "replicas", model_uid="m") == value(found, "namespaces") == 2
    assert value(found, "enabled") == value(found, "routable_replicas") == 0
    assert value(found, "routing", model_uid="m", mode=mode) == routes


def test_a_tracker_that_does_not_answer_has_no_other_series() -> None:
    found = samples({"m": None}, up=True)
    assert {name: values for name, values in found.items() if values} == {
        "build_info": [({"version": __version__, "xinference": XINFERENCE, "vllm": ""}, 1)],
        "up": [({}, 1)],
        "tracker_up": [({"model_uid": "m"}, 0)],
    }


def test_a_replica_without_a_report_has_no_zeros() -> None:
    """Prometheus would take zeros for a restart, and count the next figures as growth."""
    found = scraped([member("m-rep0", {"stale": True})])
    assert value(found, "replica_up") == 0
    assert found["prompt_tokens_total"] == found["fetches_total"] == found["pool_bytes"] == []


def test_a_restarted_replica_replaces_its_earlier_incarnation() -> None:
    """The lease of the earlier one has not ended yet."""
    before = [member("m-rep0", stats(stale=True, requests=9), incarnation=name) for name in "ab"]
    assert replicas_of(scraped(before)) == ["0"]
    now = member("m-rep0", stats(requests=1), incarnation="c")
    found = scraped([*before, now])
    assert replicas_of(found) == ["0"]
    assert value(found, "requests_total") == 1


def test_engines_that_were_given_one_name_are_told_apart() -> None:
    engines = [member("m-rep0", stats(requests=n), incarnation=f"e{n}") for n in (1, 2)]
    found = scraped(engines)
    assert replicas_of(found) == ["0", "0/2"]
    assert value(found, "requests_total", replica_index="0/2") == 2


def test_labels_and_values_are_those_of_xinference() -> None:
    """Queries join our metrics with xinference's."""
    names = ("m-rep0_dp0", "m-rep0_dp1", "m-rep12", "own-name")
    status = report(status_of([member(name, stats()) for name in names]))
    workers = {"m": {"m-rep0": "10.0.0.1:1", "m-rep12": "10.0.0.2:1"}}
    found = samples({"m": status}, up=True, workers=workers)
    names_of = ("model_uid", "replica_index", "dp_rank", "worker_address")
    assert [itemgetter(*names_of)(labels) for labels, _ in found["replica_up"]] == [
        ("m", "0", "0", "10.0.0.1:1"),
        ("m", "0", "1", "10.0.0.1:1"),
        ("m", "12", "", "10.0.0.2:1"),
        ("m", "own-name", "", ""),
    ]


def test_the_versions_that_run() -> None:
    replicas = [("m-rep0", "0.33.0"), ("m-rep1", "0.32.0"), ("m-rep2", "0.33.0"), ("m-rep3", None)]
    found = scraped([member(name, stats(vllm=version)) for name, version in replicas])
    assert found["build_info"] == [
        ({"version": __version__, "xinference": XINFERENCE, "vllm": vllm}, 1)
        for vllm in ("0.32.0", "0.33.0")
    ]


def labels_of(found: Samples) -> list[tuple[str, Labels]]:
    return [(name, labels) for name, values in found.items() for labels, _ in values]


def test_every_series_has_the_labels_of_its_family_and_appears_once() -> None:
    figures = fetched((None, 1.0, 1), *((reason, 1.0, 1) for reason in ROLLBACKS))
    found = scraped([member(f"m-rep{number}", figures) for number in range(3)])
    known = {family.name: set(family.labels) for family in FAMILIES}
    series = labels_of(found)
    for name, labels in series:
        assert labels.keys() == known[name], name
    assert len({(name, *sorted(labels.items())) for name, labels in series}) == len(series)


def test_a_peer_cannot_invent_values_of_labels() -> None:
    figures = asdict(FetchStats())
    figures["reasons"] = {f"because {number}": 1 for number in range(1000)}
    by_transport = {f"transport {number} {'x' * 1000}": figures for number in range(1000)}
    made_up = stats(fetches={"by_transport": by_transport}, not_sharing="I like it")
    versions = [f"{number}{'x' * 1000}" for number in range(1000)]
    others = [member(f"m-rep{each[:9]}", {"vllm": each}) for each in versions]
    found = scraped([member("m-rep0", made_up), *others])
    assert {labels["reason"] for labels, _ in found["sharing"]} == {"other"}
    reasons = {labels["reason"] for labels, _ in found["fetches_total"]}
    assert reasons == {"", "other"}
    for name, label in (("fetches_total", "transport"), ("build_info", "vllm")):
        shown = {labels[label] for labels, _ in found[name]}
        assert (len(shown), max(map(len, shown))) == (8, 64), name


def test_the_most_series_that_a_replica_can_have() -> None:
    """A cluster has at most so many for each replica."""
    figures = fetched((None, 1.0, 1), *((reason, 1.0, 1) for reason in ROLLBACKS))
    fetches = figures["fetches"]["by_transport"]
    fetches |= dict.fromkeys(("", "shared_memory"), fetches["gloo"])
    found = scraped([member("m-rep0", figures)])
    of_replica = [labels for _, labels in labels_of(found) if "replica_index" in labels]
    buckets = 3 * 2 * (len(FetchSeconds.bounds) + 3)
    waits = len(HIT_SOURCES) * (len(AnswerSeconds.bounds) + 3)
    routed = 2
    assert len(of_replica) + buckets + waits + routed < 360


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.data())
def test_a_malformed_report_does_not_affect_other_replicas(data: st.DataObject) -> None:
    """Anything may take the place of a figure, at any depth."""
    seed = data.draw(st.integers(0, 1 << 30))
    broken = _broken(fetched((None, 1.0, 1), ("link", 1.0, 0)), data.draw(JSON), seed)
    found = scraped([member("bad", broken), member("good", stats())])
    assert value(found, "requests_total", replica_index="good") == 5
    for values in found.values():
        for _, number in values:
            for part in number.values() if isinstance(number, dict) else [number]:
                assert 0 <= part < math.inf


def _broken(figures: dict[str, Any], junk: Any, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    place = figures
    while True:
        key = chance.choice(sorted(place))
        if not isinstance(place[key], dict) or not place[key] or chance.random() < 0.3:
            place[key] = junk
            return figures
        place = place[key]

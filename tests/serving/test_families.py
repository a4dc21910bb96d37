"""What a scrape shows of the replicas' figures."""

import itertools
import math
import random
from dataclasses import asdict
from importlib import metadata
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier import __version__
from xinference_xavier.errors import ROLLBACKS, NotSharing
from xinference_xavier.serving.metrics import FAMILIES, Labels, Samples, samples
from xinference_xavier.stats.report import report
from xinference_xavier.stats.schema import (
    CHOICES,
    HIT_SOURCES,
    AnswerSeconds,
    FetchBytes,
    FetchSeconds,
    FetchStats,
    FirstTokens,
    RoutingStats,
)

ROW_BYTES = 1 << 20
XINFERENCE = metadata.version("xinference")


def stats(**changes: Any) -> dict[str, Any]:
    """A replica's report."""
    return {
        "hits": {"prefix_cache": 1, "local_pool": 2, "remote": 3, "computed": 4},
        "requests": 5,
        "prefill_tokens_per_s": 600.0,
        "seconds_saved": 7.5,
        "fetch_decisions": {
            "fetched": 11, "computed": 12, "actual_s": 1.5, "error_s": 0.25,
            "slower_than_prefill": 13,
        },
        "waits": {"claimed": 14, "waited": 15, "given_up": 6, "seconds": 2.5},
        "fetching": {"b": 2, "c": 1},
        "fetches": {
            "started": 0, "committed": 0, "rolled_back": {}, "by_transport": {},
            "unreleased_grants": 21,
        },
        "not_sharing": None,
        "pool": {
            "rows": 100, "ready": 50, "filling": 3, "pinned": 8, "quarantined": 2,
            "row_bytes": ROW_BYTES,
        },
        "grants": {"live": 1, "refused": 9},
        "mirror": {"keys": 40, "dropped": 22},
        "warm_join": {"chunks": 27, "seconds": 3.5, "failures": 28},
        "refused_posts": 25,
        "scheduler_errors": 29,
        "transfer_restarts": 1,
        "transfer_failed_calls": 26,
        "tracker_failures": 30,
        **changes,
    }  # fmt: skip


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
    return samples({"m": report(status_of(*namespaces, **tracker))}, up=True, failures=0)


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


def test_each_figure_has_its_metric() -> None:
    found = scraped([member("m-rep0", stats())])
    for source, tokens in stats()["hits"].items():
        assert value(found, "prompt_tokens_total", source=source) == tokens
    figures = {
        "requests_total": 5, "prefill_tokens_per_second": 600.0, "saved_seconds": 7.5,
        "fetching_chunks": 3, "grants": 1, "grants_refused_total": 9, "published_chunks": 30,
        "mirrored_chunks": 40, "transfer_restarts_total": 1,
        "fetches_slower_than_prefill_total": 13,
        "predicted_fetch_seconds_total": 1.5, "fetch_prediction_error_seconds_total": 0.25,
        "claimed_prefixes_total": 14, "wait_seconds_total": 2.5,
        "unreleased_grants_total": 21, "mirror_dropped_chunks_total": 22,
        "backlog_refused_total": 25, "transfer_failed_calls_total": 26,
        "warm_join_chunks_total": 27, "warm_join_seconds": 3.5, "warm_join_failures_total": 28,
        "scheduler_errors_total": 29, "tracker_failures_total": 30,
    }  # fmt: skip
    assert {
        name: value(found, name, model_uid="m", replica_index="0") for name in figures
    } == figures
    for way, count in (("fetched", 11), ("computed", 12)):
        assert value(found, "fetch_decisions_total", way=way) == count
    for outcome, count in (("arrived", 9), ("given_up", 6)):
        assert value(found, "waits_total", outcome=outcome) == count


def test_a_pools_states_add_up_to_its_size() -> None:
    found = scraped([member("m-rep0", stats())])
    states = {labels["state"]: size / ROW_BYTES for labels, size in found["pool_bytes"]}  # type: ignore[operator]
    assert states == {"ready": 50, "filling": 3, "quarantined": 2, "free": 45}
    assert value(found, "pool_pinned_bytes") == 8 * ROW_BYTES


def test_fetches_by_transport_outcome_and_reason() -> None:
    link = ("link", 1.0, 50), ("link", 1.0, 0)
    found = scraped(
        [member("m-rep0", fetched((None, 0.02, 100), (None, 0.3, 200), ("timeout", 5.0, 0), *link))]
    )
    fetches = {(s["outcome"], s["reason"]): count for s, count in found["fetches_total"]}
    assert fetches == {
        ("committed", ""): 2,
        ("rolled_back", "timeout"): 1,
        ("rolled_back", "link"): 2,
    }
    assert value(found, "received_bytes_total", transport="gloo") == 350
    sizes = value(found, "fetch_size_bytes", transport="gloo")
    assert (sizes["count"], sizes["sum"]) == (3, 350), "two fetches brought nothing"
    for outcome, seconds in (("committed", 0.32), ("rolled_back", 7.0)):
        durations = value(found, "fetch_duration_seconds", outcome=outcome)
        assert durations["sum"] == pytest.approx(seconds)


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    found = scraped([member("m-rep0", fetched((None, 0.05, 1), (None, 0.051, 1), (None, 99.0, 1)))])
    buckets = value(found, "fetch_duration_seconds", outcome="committed")
    assert (buckets[0.025], buckets[0.05], buckets[0.1], buckets[30.0]) == (0, 1, 2, 2)
    assert buckets[math.inf] == buckets["count"] == 3
    assert buckets["sum"] == pytest.approx(99.101)
    bounds = [bound for bound in buckets if isinstance(bound, float)]
    assert bounds == [*FetchSeconds.bounds, math.inf]


def test_first_tokens_of_each_replica_by_source() -> None:
    waits = FirstTokens()
    for seconds in (0.3, 4.0):
        waits.remote.observe(seconds)
    found = scraped(
        [member("m-rep0", stats(first_tokens=asdict(waits))), member("m-rep1", stats())]
    )
    name = "time_to_first_token_seconds"
    remote = value(found, name, replica_index="0", source="remote")
    assert (remote[0.2], remote[0.5], remote[5.0], remote["sum"]) == (0, 1, 2, 4.3)
    for replica, source in itertools.product(("0", "1"), HIT_SOURCES):
        count = value(found, name, model_uid="m", replica_index=replica, source=source)["count"]
        assert count == (2 if (replica, source) == ("0", "remote") else 0)


@pytest.mark.parametrize("reason", NotSharing)
def test_why_a_replica_does_not_share(reason: str) -> None:
    found = scraped([member("m-rep0", stats(not_sharing=reason)), member("m-rep1", stats())])
    assert value(found, "sharing", replica_index="0", reason=reason) == 0
    assert value(found, "sharing", replica_index="1", reason="") == 1


def test_figures_of_the_model() -> None:
    found = scraped(
        [member("m-rep0", stats()), member("m-rep1", stats())], [member("m-rep2", stats())]
    )
    assert value(found, "replicas", model_uid="m") == 3
    assert value(found, "namespaces") == 2
    assert value(found, "enabled") == value(found, "tracker_up") == 1
    assert value(scraped([], enabled=False), "enabled") == 0


def test_chunks_and_calls_that_a_tracker_had_no_room_for() -> None:
    found = scraped([], dropped=3, refused=4)
    assert value(found, "tracker_dropped_chunks_total", model_uid="m") == 3
    assert value(found, "tracker_refused_total", model_uid="m") == 4


def scraped_with(**part: Any) -> Samples:
    """A scrape of a process that adds a part to the report of a model without replicas."""
    status = report({"model_uid": "m", "enabled": True, "namespaces": {}})
    return samples({"m": {**status, **part}}, up=True, failures=0)


def routed(**figures: Any) -> Samples:
    return scraped_with(routing=figures)


def test_figures_of_routing() -> None:
    found = routed(
        waiting=1, waited=2, waited_s=3.5, refused=4, moved=5, unrouted=6, failures=8
    )  # fmt: skip
    for name, number in {
        "routing_waiting_requests": 1, "routing_waits_total": 2, "routing_wait_seconds_total": 3.5,
        "routing_refused_total": 4, "routing_moved_total": 5, "unrouted_requests_total": 6,
        "routing_failures_total": 8,
    }.items():  # fmt: skip
        assert value(found, name, model_uid="m") == number, name


def test_forecasts_beside_what_happened_by_reason() -> None:
    """Each reason has its series from the start, the rest of an answer too, and nothing else."""
    counted = RoutingStats()
    counted.answered("fetch", predicted=0.5, actual=3.0)
    counted.answered("made up", predicted=0.5, actual=3.0)
    found = routed(**asdict(counted))
    for name, seconds in (("predicted", 0.5), ("actual", 3.0), ("prediction_error", 2.5)):
        family = f"routing_{name}_seconds"
        counts = {labels["reason"]: each["count"] for labels, each in found[family]}  # type: ignore[index]
        assert counts == dict.fromkeys((*CHOICES, "decode"), 0) | {"fetch": 1}
        assert value(found, family, model_uid="m", reason="fetch")["sum"] == seconds


@pytest.mark.parametrize(("mode", "routes"), [("auto", 1), ("backlog", 1), ("off", 0), ("", 0)])
def test_how_requests_are_routed(mode: str, routes: int) -> None:
    assert value(routed(mode=mode), "routing", model_uid="m", mode=mode) == routes


def test_every_reason_of_a_choice_has_a_series_from_the_start() -> None:
    """Prometheus would miss the first request of a series that begins with it."""
    choices = routed(choices={"local": 3, "made up": 9})["routing_choices_total"]
    assert {labels["reason"]: count for labels, count in choices} == {
        "local": 3, "fetch": 0, "compute": 0, "backlog": 0, "prefill": 0,
    }  # fmt: skip


def test_every_state_of_named_prefixes_has_a_series_from_the_start() -> None:
    named = scraped_with(prefix_states={"kept": 2, "made up": 9})["named_prefixes"]
    counts = {labels["state"]: count for labels, count in named}
    assert counts == {"kept": 2, "computing": 0, "waiting": 0, "failed": 0}


def test_requests_and_loads_by_replica() -> None:
    """A replica that has left keeps its count, and a new one has a series from the start."""
    busy = {"backlog_s": 1.5, "requests": 2, "accepts": True}
    found = routed(replicas={"gone": 3, "m-rep0": 4}, loads={"m-rep0": busy, "m-rep1": busy})
    counts = {labels["replica_index"]: count for labels, count in found["routed_requests_total"]}
    assert counts == {"gone": 3, "0": 4, "1": 0}
    assert value(found, "prefill_backlog_seconds", model_uid="m", replica_index="1") == 1.5
    assert value(found, "routable_replicas", model_uid="m") == 2


def test_a_process_that_hears_from_no_replica_routes_nothing() -> None:
    found = scraped([member("m-rep0", stats())])
    assert value(found, "routable_replicas", model_uid="m") == 0
    assert value(found, "routing", mode="") == 0


def test_a_tracker_that_does_not_answer_has_no_other_series() -> None:
    found = samples({"m": None}, up=True, failures=3)
    assert {name: values for name, values in found.items() if values} == {
        "build_info": [({"version": __version__, "xinference": XINFERENCE, "vllm": ""}, 1)],
        "up": [({}, 1)],
        "scrape_failures_total": [({}, 3)],
        "tracker_up": [({"model_uid": "m"}, 0)],
    }


def test_a_replica_without_a_report_has_no_zeros() -> None:
    """Prometheus would take zeros for a restart, and count the next figures as growth."""
    found = scraped([member("m-rep0", {"stale": True})])
    assert value(found, "replica_up") == 0
    assert found["prompt_tokens_total"] == found["fetches_total"] == found["pool_bytes"] == []


def test_bytes_sent_are_shown_only_if_the_transfer_process_answered() -> None:
    known = stats(transport="gloo", bytes_sent=6)
    found = scraped([member("m-rep0", known), member("m-rep1", stats(stale=True))])
    assert value(found, "sent_bytes_total") == 6


def test_a_restarted_replica_replaces_its_earlier_incarnation() -> None:
    """The lease of the earlier one has not ended yet."""
    before = member("m-rep0", stats(stale=True, requests=9), incarnation="a")
    now = member("m-rep0", stats(requests=1), incarnation="b")
    found = scraped([before, now])
    assert replicas_of(found) == ["0"]
    assert value(found, "requests_total") == 1


def test_of_several_silent_incarnations_one_is_shown() -> None:
    gone = [member("m-rep0", stats(stale=True), incarnation=name) for name in ("a", "b")]
    assert replicas_of(scraped(gone)) == ["0"]


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
    found = samples({"m": status}, up=True, failures=0, workers=workers)
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
    found = scraped([member("m-rep0", made_up)])
    assert {labels["reason"] for labels, _ in found["sharing"]} == {"other"}
    reasons = {labels["reason"] for labels, _ in found["fetches_total"]}
    assert reasons == {"", "other"}
    transports = {labels["transport"] for labels, _ in found["fetches_total"]}
    assert len(transports) == 8
    assert max(map(len, transports)) == 64


def test_a_peer_cannot_invent_versions() -> None:
    made_up = [f"{number}{'x' * 1000}" for number in range(1000)]
    found = scraped([member(f"m-rep{each[:9]}", stats(vllm=each)) for each in made_up])
    shown = [labels["vllm"] for labels, _ in found["build_info"]]
    assert len(shown) == 8
    assert max(map(len, shown)) == 64


def test_the_most_series_that_a_replica_can_have() -> None:
    """A cluster has at most so many for each replica."""
    figures = fetched((None, 1.0, 1), *((reason, 1.0, 1) for reason in ROLLBACKS))
    fetches = figures["fetches"]["by_transport"]
    fetches |= dict.fromkeys(("", "shared_memory"), fetches["gloo"])
    found = scraped([member("m-rep0", figures)])
    of_replica = [labels for _, labels in labels_of(found) if "replica_index" in labels]
    buckets = 3 * (2 * (len(FetchSeconds.bounds) + 3) + len(FetchBytes.bounds) + 3)
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

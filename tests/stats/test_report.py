"""Dataclasses are read from anything that a peer sends, and added up; a tracker's status becomes a
report, and the sums of the replicas' counts, sampled over an hour, its history."""

import itertools
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.protocol.tracker import SHORT_KEY, Member, Settings
from xinference_xavier.stats import report as module
from xinference_xavier.stats.report import (
    INTERVAL,
    MAX_NUMBER,
    MAX_SAMPLES,
    History,
    add,
    read,
    report,
)
from xinference_xavier.stats.schema import FirstTokens
from xinference_xavier.tracker import journal
from xinference_xavier.tracker.actor import BlockTracker


@dataclass
class Inner:
    count: int = 0
    by_name: dict[str, int] = field(default_factory=dict)


@dataclass
class Outer:
    name: str
    total: float = 0.0
    speed: float | None = None
    enabled: bool = True
    inner: Inner = field(default_factory=Inner)
    parts: dict[str, Inner] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


def test_values_are_read_at_every_depth() -> None:
    sent = {
        "name": "a",
        "total": 1.5,
        "speed": 2,
        "enabled": False,
        "inner": {"count": 3, "by_name": {"x": 4}},
        "parts": {"y": {"count": 5}},
        "numbers": [6, 7],
    }
    inner, part = Inner(3, {"x": 4}), Inner(5)
    assert read(Outer, sent) == Outer("a", 1.5, 2, False, inner, {"y": part}, [6, 7], sent)


@pytest.mark.parametrize("number", ["1", None, True, -1, math.nan, math.inf, MAX_NUMBER, [1], {}])
def test_anything_but_a_number_counts_as_zero(number: Any) -> None:
    sent = {"count": number, "by_name": {"x": number}}
    outer = read(Outer, {"name": "a", "inner": sent, "total": number, "numbers": [number, 1]})
    assert (outer.inner, outer.total, outer.numbers) == (Inner(0, {"x": 0}), 0, [0, 1])


@pytest.mark.parametrize("nonsense", [1, "a", None, [1], [[]]])
def test_anything_but_an_object_counts_as_an_empty_one(nonsense: Any) -> None:
    sent = {"name": "a", "inner": nonsense, "parts": nonsense, "enabled": nonsense}
    outer = read(Outer, sent)
    assert (outer.inner, outer.parts, outer.enabled) == (Inner(), {}, False)
    assert read(Inner, nonsense) == Inner()


def test_sums() -> None:
    total = Inner()
    for count in (1, 2):
        add(total, Inner(count, {"x": count, str(count): 1}))
    assert total == Inner(3, {"x": 3, "1": 1, "2": 1})


# -- reports ----------------------------------------------------------------------------------


async def test_what_a_tracker_drops_is_reported(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_KEYS", 1)
    tracker = await xo.create_actor(BlockTracker, "m", address=pool.external_address, uid="t")
    await tracker.join("ns", Member("a", "127.0.0.1:1"), Settings())
    await tracker.publish("ns", "a", 1, bytes(range(3 * SHORT_KEY)), b"", True)

    reported = report(await tracker.status())
    assert reported["tracker"] == {"dropped": 2}
    (replica,) = reported["replicas"]
    assert (replica["holdings"], reported["totals"]["holdings"]) == (1, 1)


def entry(name: str, **stats: Any) -> dict[str, Any]:
    return {"incarnation": f"i{name}", "replica": name, "holdings": 2, "stats": stats}


def test_replicas_of_all_namespaces_in_the_order_of_their_names() -> None:
    groups = {"n": [entry("m-10"), entry("m-2")], "o": [entry("m-3")]}
    namespaces = {name: {"replicas": members} for name, members in groups.items()}
    reported = report({"model_uid": "m", "enabled": True, "namespaces": namespaces})
    assert [(each["replica"], each["namespace"]) for each in reported["replicas"]] == [
        ("m-2", "n"),
        ("m-3", "o"),
        ("m-10", "n"),
    ]


# -- history ----------------------------------------------------------------------------------


def stats(peers: int) -> dict[str, Any]:
    waits = FirstTokens()
    for _ in range(peers):
        waits.remote.observe(1.0)
    return {
        "first_tokens": asdict(waits),
        "hits": {"prefix_cache": 1, "local_pool": 2, "remote": peers, "computed": 4},
        "bytes_received": 10 * peers,
        "requests": 5,
        "seconds_saved": 0.5,
        "fetches": {"started": 7, "committed": 6, "rolled_back": {"timeout": 1, "link": 2}},
    }


def last(history: History) -> dict[str, Any]:
    sample: dict[str, Any] = json.loads(history.to_json())["samples"][-1]
    return sample


def test_a_sample_sums_up_all_replicas() -> None:
    history = History()
    history.record("a", stats(3))
    history.record("b", stats(30))
    history.tick(0.0, 1000.0)
    sample = last(history)
    assert sample.pop("first_tokens")["remote"]["sum"] == 33.0
    assert sample == {
        "time": 1000.0,
        "hits": {"prefix_cache": 2, "local_pool": 4, "disk": 0, "remote": 33, "computed": 8},
        "bytes_received": 330,
        "requests": 10,
        "seconds_saved": 1.0,
        "fetches": {"started": 14, "committed": 12, "rolled_back": {"any": 6}},
    }


def test_a_replica_s_report_replaces_its_last_one() -> None:
    history = History()
    for peers in (3, 4):
        history.record("a", stats(peers))
    history.tick(0.0, 0.0)
    assert last(history)["hits"]["remote"] == 4


def test_samples_are_an_interval_apart_and_reach_an_hour_back() -> None:
    history = History()
    for second in range(4000):
        history.tick(float(second), float(second))
    samples = json.loads(history.to_json())["samples"]
    assert len(samples) == MAX_SAMPLES == 3600 / INTERVAL
    times = [sample["time"] for sample in samples]
    assert {after - before for before, after in itertools.pairwise(times)} == {INTERVAL}
    assert samples[-1]["time"] == 3990.0


def test_all_who_ask_between_two_samples_get_the_same_text() -> None:
    history = History()
    history.tick(0.0, 0.0)
    text = history.to_json()
    history.tick(INTERVAL / 2, 0.0)
    assert history.to_json() is text
    history.tick(INTERVAL, 0.0)
    assert history.to_json() != text


def test_sums_never_fall_however_many_replicas_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that comes back is not counted twice."""
    monkeypatch.setattr(module, "LIMIT", 3)
    history = History()
    for number in range(10):
        history.record(str(number), stats(1))
        history.record(str(number), stats(2))
    assert len(history._latest) == 3
    history.tick(0.0, 0.0)
    assert last(history)["hits"]["remote"] == 20

"""What operators see of real replicas: figures at a scrape and lines in the log."""

from collections.abc import Callable

import pytest

from tests.harness.replicas import DEADLINE, ReplicaProcess, fresh_keys, replicas, wait_until
from tests.monitor.scene import HITS, IDLE, ROW_BYTES, Scene, Scraped
from xinference_xavier.errors import NotSharing
from xinference_xavier.stats.schema import FetchSeconds

pytestmark = pytest.mark.process

WORKS = "INFO sharing works: incarnation=second peers=1"


def until(scene: Scene, true: Callable[[Scraped], bool], what: str) -> Scraped:
    """The first scrape of which that is true. Scrapes within a second share a report."""
    seen: list[Scraped] = []

    def look() -> bool:
        seen.append(scene.scrape())
        return true(seen[-1])

    wait_until(look, what, interval=0.05)
    return seen[-1]


def test_a_fetch_is_seen_at_the_next_scrape(scene: Scene) -> None:
    before = scene.scrape()
    assert scene.fetch(4).state == "COMMITTED"
    fetched = before("fetches_total", replica_index="second", outcome="committed") + 1
    after = until(
        scene, lambda now: now("fetches_total", outcome="committed") == fetched, "it is counted"
    )
    labels = {"model_uid": "model", "replica_index": "second", "transport": "gloo"}
    moved = before("received_bytes_total", **labels) + 4 * ROW_BYTES
    assert after("received_bytes_total", **labels) == moved
    slowest = str(FetchSeconds.bounds[-1])
    durations = {**labels, "outcome": "committed"}
    assert after("fetch_duration_seconds_bucket", **durations, le=slowest) == fetched


def test_a_fetch_that_was_rolled_back_is_seen(scene: Scene) -> None:
    labels = {
        "replica_index": "second",
        "outcome": "rolled_back",
        "reason": "not held",
        "transport": "",
    }
    before = scene.scrape()("fetches_total", **labels)
    assert scene.fail_to_fetch().reason == "not held"
    until(scene, lambda now: now("fetches_total", **labels) == before + 1, "it is counted")


def test_what_the_engine_counts(scene: Scene) -> None:
    found = until(scene, lambda now: now("requests_total") == 20, "both have reported")
    for source, tokens in HITS.items():
        assert found("prompt_tokens_total", replica_index="first", source=source) == tokens
    labels = {"replica_index": "first", "source": "remote"}
    assert found("time_to_first_token_seconds_sum", **labels) == 1.5
    assert found("time_to_first_token_seconds_bucket", **labels, le="2.0") == 1
    assert found("prefill_tokens_per_second", replica_index="second") == 1000
    assert found("saved_seconds") == 1
    assert found("sharing", reason="") == found("replicas") == 2
    rows = scene.donor.counts().rows
    assert found("pool_bytes", replica_index="first") == rows * ROW_BYTES


def test_the_loads_of_the_replicas_are_seen(scene: Scene) -> None:
    for number, replica in enumerate((scene.donor, scene.consumer)):
        replica.report_load(IDLE._replace(prefill_s=3600.0 * number))
    found = until(scene, lambda now: now("routable_replicas") == 2, "both have reported")
    assert found("routing", model_uid="model", mode="auto") == 1
    assert found("prefill_backlog_seconds", replica_index="first") == 0
    assert 3000 < found("prefill_backlog_seconds", replica_index="second") <= 3600
    assert found.has("routed_requests_total", replica_index="first")
    for replica in (scene.donor, scene.consumer):
        replica.report_load(None)


def test_every_api_process_gives_the_same_answer(scene: Scene) -> None:
    scene.fetch()
    guarded = scene.api.guarded
    here = until(scene, lambda now: Scraped(guarded).samples == now.samples, "they are equal")
    assert len(here.samples) > 100


def test_one_line_when_sharing_works_and_one_when_it_stops(scene: Scene) -> None:
    def lines() -> list[str]:
        logged = scene.consumer.logged()
        return [f"{level} {text}" for level, text in logged if text.startswith("sharing")]

    wait_until(lambda: lines()[-1:] == [WORKS], "sharing works")
    before = len(lines())
    off = {"reason": NotSharing.SWITCHED_OFF, "replica_index": "second"}
    scene.switch(False)
    try:
        wait_until(lambda: len(lines()) == before + 1, "a line says that sharing stopped")
        until(scene, lambda now: now.has("sharing", **off), "the scrape says why")
    finally:
        scene.switch(True)
    wait_until(lambda: len(lines()) == before + 2, "a line says that it works again")
    stopped = "WARNING sharing stopped, switched off by an operator: incarnation=second"
    assert lines()[before:] == [stopped, WORKS]


def test_requests_leave_no_lines_and_a_repeated_failure_is_logged_once(scene: Scene) -> None:
    """The failure is a dead peer whose lease has not ended."""
    consumer = scene.consumer
    with replicas(scene.api.address, {"third": "gloo"}) as (third,):
        _share(third, consumer)
        before = consumer.logged()
        for _ in range(10):
            _share(third, consumer)
        assert consumer.logged() == before, "a request left a line"
        third.kill()
    reasons = {consumer.fetch("third", fresh_keys(1), 1.0).reason for _ in range(10)}
    assert "donor unreachable" in reasons
    logged = [text for _, text in consumer.logged() if text.startswith("fetch failed: donor=third")]
    assert len(logged) == 1
    until(scene, lambda now: now("replicas") == 2, "its lease has ended")


def _share(donor: ReplicaProcess, consumer: ReplicaProcess) -> None:
    keys = fresh_keys(1)
    donor.store(keys)
    wait_until(lambda: bool(consumer.holders(keys[0])), "the consumer knows the chunk")
    assert consumer.fetch(donor.name, keys, DEADLINE).state == "COMMITTED"

"""What operators see of real replicas: figures at a scrape and lines in the log."""

from collections.abc import Callable

import pytest

from tests.harness.api import Pair
from tests.harness.replicas import DEADLINE, ReplicaProcess, fresh_keys, replicas, wait_until
from tests.monitor.scene import ROW_BYTES, Scene, Scraped
from xinference_xavier.errors import NotSharing
from xinference_xavier.stats.schema import FetchSeconds

pytestmark = pytest.mark.process


@pytest.fixture
def scene(pair: Pair) -> Scene:
    return Scene(*pair)


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

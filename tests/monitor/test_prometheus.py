"""A real Prometheus takes our files, scrapes real replicas, and has data for every query."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.harness.api import Pair
from tests.harness.replicas import replicas, wait_until
from tests.monitor.files import ALERTS, PROMETHEUS, alerts, queries
from tests.monitor.prometheus import Prometheus, promtool
from tests.monitor.scene import COUNTED, IDLE, Scene
from xinference_xavier.serving.metrics import PREFIX

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def prometheus(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after some traffic, all of which is in a window of 10 s."""
    endpoint = urlsplit(f"{pair.api.endpoint}/metrics")
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), endpoint.netloc, endpoint.path)
    try:
        scene = Scene(*pair)
        for replica in (pair.first, pair.second):
            replica.count(COUNTED)
            replica.report_load(IDLE)
        routable = f"sum({PREFIX}routable_replicas) == 2"
        wait_until(lambda: bool(started.query(routable)), "the loads are known", interval=0.1)
        for _ in range(2):  # series appear first, then grow
            scene.fetch()
            scene.fail_to_fetch()
            wait_until_scraped(started, scene.consumer.stats()["fetches"]["committed"])
        yield started
    finally:
        started.stop()
        for replica in (pair.first, pair.second):
            replica.report_load(None)


def wait_until_scraped(prometheus: Prometheus, committed: int) -> None:
    fetches = f'{PREFIX}fetches_total{{outcome="committed",replica_index="second"}} == {committed}'
    wait_until(
        lambda: bool(prometheus.query(fetches)), "Prometheus has scraped the fetch", interval=0.1
    )


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", ALERTS), ("check", "config", PROMETHEUS)],
    ids=["rules", "configuration"],
)
def test_promtool_accepts_our_files(arguments: tuple[object, ...]) -> None:
    checked = promtool(*arguments)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "FAILED" not in checked.stdout


def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    tested = promtool("test", "rules", Path(__file__).parent / "alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_it_scrapes_us_without_complaints(prometheus: Prometheus) -> None:
    target = prometheus.target()
    assert (target["health"], target["lastError"]) == ("up", "")
    assert prometheus.complaints() == []


def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus) -> None:
    empty = [query for query in queries() if not prometheus.query_range(query.filled_in(), 10.0)]
    assert empty == []


def test_it_evaluates_our_rules_and_none_fires_for_healthy_replicas(
    prometheus: Prometheus,
) -> None:
    def all_are_evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in prometheus.rules())

    wait_until(all_are_evaluated, "all rules were evaluated", interval=0.1)
    rules = prometheus.rules()
    assert [rule["name"] for rule in rules] == [alert["alert"] for alert in alerts()]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] != "inactive"] == []


def test_a_condition_that_has_just_begun_is_pending(prometheus: Prometheus, pair: Pair) -> None:
    """This tests the whole path from a replica to a rule; promtool tests when the rule fires."""

    def state() -> str:
        (rule,) = (rule for rule in prometheus.rules() if rule["name"] == "XavierReplicaLost")
        found: str = rule["state"]
        return found

    assert state() == "inactive"
    with replicas(pair.api.address, {"third": "gloo"}):
        members = f"sum({PREFIX}replicas) == 3"
        wait_until(lambda: bool(prometheus.query(members)), "it is scraped", interval=0.1)
    wait_until(lambda: state() == "pending", "the replica is missed", interval=0.2)

"""On one host, a prefix needs to be in one pool only: routers know which replicas load it from
there."""

import random
from collections.abc import Sequence

from tests.harness.comparisons import compared, compared_index, snapshot
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.routing.forecast import Chunks, Forecast, Prompt
from xinference_xavier.routing.known_replica import Rates, Replica, Report
from xinference_xavier.routing.router import Router

KEYS = [b"%012d" % number for number in range(8)]
RATES = Rates(token_s=0.001, depth_s=0.0, fetch_s=0.01, byte_s=0.001)
PROMPT = Prompt(8 * 128 + 1, KEYS)


class Hosts:
    """Two replicas of one host and one of another, of which the first of all holds the prompt."""

    def __init__(self) -> None:
        self.index: Index[Peers] = compared_index()
        self.router = Router(self.index, Chunks(128, 1), random.Random(0))
        self.index.apply(snapshot(*map(compared, ("here", "near", "far")), here=KEYS))
        self.report("here", near=("near",))
        self.report("near", near=("here", "gone"))
        self.report("far")

    def report(self, name: str, near: Sequence[str] = (), waiting: float = 0.0) -> None:
        report = Report(0.0, 0, waiting, 0, rates=RATES, near=near)
        self.router.report(Replica(name, name, name, report), report)

    def forecasts(self) -> dict[str, Forecast]:
        found = self.router.forecasts(self.router._forecaster(PROMPT, 1.0))
        return {each.replica.name: each for each in found}


def test_a_neighbour_of_the_holder_has_the_prefix_and_another_host_fetches_it() -> None:
    found = Hosts().forecasts()
    assert {name: each.run for name, each in found.items()} == {"here": 8, "near": 8, "far": 0}
    assert found["near"].terms == found["here"].terms
    assert found["far"].terms.fetch > 0.01


def test_a_common_prefix_is_sent_to_all_replicas_of_the_host_in_equal_parts() -> None:
    """Not to the one that happens to hold it."""
    hosts = Hosts()
    chosen = [hosts.router.choose(PROMPT, 1.0) for _ in range(40)]
    names = [choice.forecast.replica.name for choice in chosen if choice is not None]
    assert {*names} == {"here", "near"}
    assert 10 <= names.count("near") <= 30

"""Whether sharing helps now, from the samples of the last minutes."""

from dataclasses import asdict
from typing import Any

from tests.serving.ui.reports import model, replica
from tests.serving.ui.scripts import Scripts
from xinference_xavier.stats.schema import HIT_SOURCES, FirstTokens

Samples = list[dict[str, Any]]
SOURCES = [source for source in HIT_SOURCES if source != "disk"]


def samples(*hits: tuple[int, int, int, int], first_tokens: FirstTokens | None = None) -> Samples:
    """One each 100 s, with tokens in the order of SOURCES; people waited in the last one."""
    found: Samples = [
        {"time": 1000 + 100 * number, "hits": dict(zip(SOURCES, tokens, strict=True), disk=0)}
        for number, tokens in enumerate(hits)
    ]
    if found and first_tokens is not None:
        found[-1]["first_tokens"] = asdict(first_tokens)
    return found


def recent(scripts: Scripts, shown: Samples, **stats: Any) -> Any:
    totals = model(replica(0, **stats))["totals"]
    return scripts.call("page/numbers.js", "recentOf", shown, totals)


def test_it_helps(scripts: Scripts) -> None:
    """At this replica's speed, 28,000 shared tokens saved 14 s so far: half a millisecond each."""
    waits = FirstTokens()
    for _ in range(3):
        waits.remote.observe(0.15)
    seen = recent(
        scripts,
        samples((0, 0, 0, 0), (0, 1000, 2000, 1000), first_tokens=waits),
        seconds_saved=14.0,
    )
    assert (seen["shared"], seen["rate"], seen["saved"]) == (3000, 30, 1.5)
    assert seen["waits"]["remote"]["requests"] == 3
    assert round(seen["waits"]["remote"]["median"], 3) == 0.15
    assert seen["waits"]["computed"] == {"requests": 0, "median": None}


def test_what_is_older_than_five_minutes_does_not_count(scripts: Scripts) -> None:
    before = [(0, 0, 0, 0), (0, 9000, 0, 0)]
    seen = recent(scripts, samples(*before, *[(0, 9000, 0, 0)] * 2, (0, 9000, 0, 100)))
    assert (seen["shared"], seen["hits"]["computed"]) == (0, 100)


def test_a_replica_that_leaves_takes_nothing_away(scripts: Scripts) -> None:
    """With it, its counts leave the totals."""
    seen = recent(scripts, samples((0, 0, 5000, 0), (0, 0, 6000, 0), (0, 0, 10, 0), (0, 0, 510, 0)))
    assert seen["rate"] == 5


def test_nothing_is_claimed_without_samples_and_no_time_without_a_speed(scripts: Scripts) -> None:
    assert recent(scripts, samples()) is None
    seen = recent(scripts, samples((0, 0, 0, 0), (0, 0, 9, 0)), seconds_saved=0.0)
    assert seen["saved"] is None

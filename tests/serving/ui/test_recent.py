"""The first view answers whether sharing helps now, from the samples of the last minutes."""

from dataclasses import asdict
from typing import Any

from tests.serving.ui.reports import model, replica
from tests.serving.ui.scripts import Scripts, find, text_of
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


def view(scripts: Scripts, shown: Samples, **stats: Any) -> Any:
    return scripts.call("page/views.js", "recentView", model(replica(0, **stats)), shown)


def test_it_helps(scripts: Scripts) -> None:
    """At this replica's speed, 28,000 shared tokens saved 14 s so far: half a millisecond each."""
    waits = FirstTokens()
    for _ in range(3):
        waits.remote.observe(0.15)
    seen = view(
        scripts,
        samples((0, 0, 0, 0), (0, 1000, 2000, 1000), first_tokens=waits),
        seconds_saved=14.0,
    )
    assert text_of(find(seen, "helps")).startswith("Yes: 75% of the prompt tokens were shared")
    assert text_of(find(seen, "shared-now")) == "30 tokens/s"
    assert text_of(find(seen, "saved-now")) == "1.5 s"
    assert "by 3,000 shared tokens" in text_of(seen)
    waited = text_of(find(seen, "waits-now"))
    assert "Remote 150 ms 3" in waited
    assert "Computed – 0" in waited


def test_what_is_older_than_five_minutes_does_not_count(scripts: Scripts) -> None:
    before = [(0, 0, 0, 0), (0, 9000, 0, 0)]
    seen = view(scripts, samples(*before, *[(0, 9000, 0, 0)] * 2, (0, 9000, 0, 100)))
    assert text_of(find(seen, "helps")) == "Not in this time: no prompt token was shared."


def test_a_replica_that_leaves_takes_nothing_away(scripts: Scripts) -> None:
    """With it, its counts leave the totals."""
    seen = view(scripts, samples((0, 0, 5000, 0), (0, 0, 6000, 0), (0, 0, 10, 0), (0, 0, 510, 0)))
    assert text_of(find(seen, "shared-now")) == "5 tokens/s"


def test_without_prompts_and_without_samples_it_says_so(scripts: Scripts) -> None:
    idle = view(scripts, samples((0, 0, 9, 9), (0, 0, 9, 9)))
    assert text_of(find(idle, "helps")) == "No prompt came in this time."
    assert "The first samples arrive within 20 seconds." in text_of(view(scripts, samples()))


def test_without_a_measured_speed_no_time_is_claimed(scripts: Scripts) -> None:
    seen = view(scripts, samples((0, 0, 0, 0), (0, 0, 9, 0)), seconds_saved=0.0)
    assert text_of(find(seen, "saved-now")) == "–"
    assert "time not yet measured" in text_of(seen)

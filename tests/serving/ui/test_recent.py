"""Whether sharing helps now, from the samples of the last minutes."""

from dataclasses import asdict
from typing import Any

from tests.serving.ui.reports import sample
from tests.serving.ui.scripts import Scripts
from xinference_xavier.stats.schema import FirstTokens

Samples = list[dict[str, Any]]


def samples(*remote_and_computed: tuple[int, int]) -> Samples:
    """One each 100 s, with tokens of two sources."""
    return [
        sample(1000 + 100 * number, hits={"remote": remote, "computed": computed})
        for number, (remote, computed) in enumerate(remote_and_computed)
    ]


def recent(scripts: Scripts, shown: Samples) -> Any:
    return scripts.call("page/numbers.js", "recentOf", shown)


def test_it_helps(scripts: Scripts) -> None:
    waits = FirstTokens()
    for _ in range(3):
        waits.remote.observe(0.15)
    shown = samples((0, 0), (2000, 1000))
    shown[-1]["first_tokens"] = asdict(waits)
    seen = recent(scripts, shown)
    assert (seen["hits"]["remote"], seen["hits"]["computed"]) == (2000, 1000)
    assert round(seen["medians"]["remote"], 3) == 0.15
    assert seen["medians"]["computed"] is None


def test_what_is_older_than_five_minutes_does_not_count(scripts: Scripts) -> None:
    seen = recent(scripts, samples((0, 0), *[(9000, 0)] * 3, (9000, 100)))
    assert (seen["hits"]["remote"], seen["hits"]["computed"]) == (0, 100)


def test_a_replica_that_leaves_takes_nothing_away(scripts: Scripts) -> None:
    """With it, its counts leave the totals."""
    seen = recent(scripts, samples((5000, 0), (6000, 0), (10, 0), (510, 0)))
    assert seen["hits"]["remote"] == 1500


def test_nothing_is_claimed_without_samples(scripts: Scripts) -> None:
    assert recent(scripts, samples((9000, 0))) is None

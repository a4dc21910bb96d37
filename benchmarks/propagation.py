"""How soon updates of 10,000 keys per second reach the watchers of a tracker; for part `tracker`.

Tracker, watchers and publisher run in processes of their own, and each publication carries its
time. All of them share one machine, unlike in a cluster. So the same is measured in turns with a
`Bell`: the same calls to the same watchers, from an actor whose answers have no content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import quantiles
from typing import Any, NamedTuple

from benchmarks.figures import figure, ratio, shown
from benchmarks.watchers import KEY_BYTES, NAMESPACE, TrackerProcess, Watchers, stamped
from xinference_xavier.protocol.tracker import Member, Settings

RUNS = 5
KEYS_PER_SECOND = 10_000
PAUSE = 0.01
"""Seconds between two publications."""
PUBLICATIONS = 50
"""Publications per run."""
_KEYS = int(KEYS_PER_SECOND * PAUSE)
_PUBLISHER = "publisher"


class _Run(NamedTuple):
    """Delays of updates and of the publisher's calls in ms, the published keys per second, and the
    processor seconds per second."""

    p50_ms: float
    p99_ms: float
    call_p50_ms: float
    call_p99_ms: float
    keys_per_s: float
    tracker_cores: float
    watchers_cores: float


async def measure(counts: Sequence[int]) -> list[dict[str, Any]]:
    """Measure once for each number of watchers."""
    found = []
    for count in counts:
        with TrackerProcess() as tracker, Watchers(tracker.address, count) as watchers:
            found.append({"watchers": count, **await _to(watchers, tracker)})
            tracker.close()  # first, so that it does not answer watchers that have ended
    return found


async def _to(watchers: Watchers, tracker: TrackerProcess) -> dict[str, Any]:
    actor, bell = await tracker.actor(), await tracker.bell()
    await actor.join(NAMESPACE, Member(_PUBLISHER, "127.0.0.1:1"), KEY_BYTES, Settings())
    runs, references = [], []
    for number in range(RUNS):
        first = 1 + number * PUBLICATIONS
        runs.append(await _run(actor, first, watchers, tracker))
        references.append(await _run(bell, first, watchers, tracker))
    return {
        **{name: figure([getattr(run, name) for run in runs]) for name in _Run._fields},
        "bell_p50_ms": figure([run.p50_ms for run in references]),
        "bell_p99_ms": figure([run.p99_ms for run in references]),
        "p99/bell": ratio([run.p99_ms for run in runs], [run.p99_ms for run in references]),
    }


async def _run(actor: Any, first: int, watchers: Watchers, tracker: TrackerProcess) -> _Run:
    spent = tracker.seconds(), watchers.seconds()
    began = time.monotonic()
    calls = await _publish(actor, first)
    published = time.monotonic() - began
    delays = watchers.delays(actor.uid.decode(), PUBLICATIONS)
    took = time.monotonic() - began
    return _Run(
        p50_ms=_percentile(delays, 50),
        p99_ms=_percentile(delays, 99),
        call_p50_ms=_percentile(calls, 50),
        call_p99_ms=_percentile(calls, 99),
        keys_per_s=PUBLICATIONS * _KEYS / published,
        tracker_cores=(tracker.seconds() - spent[0]) / took,
        watchers_cores=(watchers.seconds() - spent[1]) / took,
    )


async def _publish(actor: Any, first: int) -> list[float]:
    """The duration of each call in ms. A call longer than the pause delays those after it."""
    took = []
    start = time.monotonic()
    for number in range(PUBLICATIONS):
        await asyncio.sleep(max(0.0, start + number * PAUSE - time.monotonic()))
        keys = stamped(_KEYS)
        began = time.monotonic()
        await actor.publish(NAMESPACE, _PUBLISHER, first + number, keys, b"")
        took.append((time.monotonic() - began) * 1e3)
    return took


def _percentile(samples: list[float], percent: int) -> float:
    return quantiles(samples, n=100)[percent - 1]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"Updates of {KEYS_PER_SECOND:,} keys per second on their way to watchers, in ms from "
        "before the publisher's call until after the mirror's update. Tracker, publisher and all "
        "watchers share this machine's processors. So the columns `empty` have the same calls "
        "between the same processes, taken in turns, without content in the answers. The remaining "
        "columns have the publisher's call alone, the keys that it managed to publish, and the "
        "processors that tracker and watchers used.",
        "",
        "| watchers | median | p99 | empty, median | empty, p99 | ratio of the p99s |"
        " a call, median | a call, p99 | keys per s | tracker | watchers |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            *(shown(row[name], 1) for name in ("p50_ms", "p99_ms", "bell_p50_ms", "bell_p99_ms")),
            shown(row["p99/bell"]),
            *(shown(row[name], 1) for name in ("call_p50_ms", "call_p99_ms")),
            shown(row["keys_per_s"], 0),
            *(shown(row[name]) for name in ("tracker_cores", "watchers_cores")),
        )
        lines.append(f"| {row['watchers']} | {' | '.join(cells)} |")
    return "\n".join(lines)

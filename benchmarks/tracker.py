"""Part `tracker`: what an index of a million keys costs, and how soon its updates arrive.

Lookups and updates are timed in one process, lookups also in a dictionary. Throughput is that of
one tracker process while replicas publish as fast as it answers. Then each publication carries its
time, at 10,000 keys a second, and watchers note when it is in their indexes: tracker, watchers and
publisher run in processes of their own, but share one machine, unlike in a cluster.
"""

import asyncio
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import quantiles
from typing import Any

import psutil

from benchmarks.figures import figure, shown, table
from benchmarks.watchers import NAMESPACE, MeasuredTracker, Watchers, stamped
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.tracker import (
    SHORT_KEY,
    Comparison,
    Member,
    Settings,
    Verdict,
    pack,
    unpack,
)
from xinference_xavier.tracker.journal import Journal

KEYS = 1_000_000
MEMBERS = (2, 16, 64, 256)
"""Members that hold the keys in equal parts."""
LOOKUPS = 200_000
CHANGES, BATCH = 1000, 100
"""Publications that are applied at once, and the keys that each adds, and removes."""
RUN = 1000
"""Leading chunks of a prompt that all members hold."""
REPLICAS = (2, 16, 64)
PUBLISHED = 1000
"""Keys per publication as fast as possible."""
RUNS = 5
SECONDS = 0.5
"""Seconds per run of publishing as fast as possible."""
KEYS_PER_SECOND = 10_000
PAUSE = 0.01
"""Seconds between two publications that are timed on their way."""
PUBLICATIONS = 50
"""Publications per run."""
_TIMED_KEYS = int(KEYS_PER_SECOND * PAUSE)
_PUBLISHER = "publisher"


def measure() -> dict[str, Any]:
    return {
        "holdings": [_in_process_of_its_own(count) for count in MEMBERS],
        "throughput": asyncio.run(_throughput()),
        "propagation": asyncio.run(_propagation()),
    }


# -- in one process ---------------------------------------------------------------------------


def _in_process_of_its_own(count: int) -> dict[str, Any]:
    """What other parts have freed would be used again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_holdings, count, KEYS, LOOKUPS).result()


def _holdings(count: int, total: int, lookups: int) -> dict[str, Any]:
    """`count` members hold the keys in equal parts."""
    journal, names = Journal(), [f"member {number}" for number in range(count)]
    held = {name: os.urandom(SHORT_KEY * (total // count)) for name in names}
    for name in names:
        journal.join(Member(name, "127.0.0.1:1", True, Comparison(Verdict.COMPARED)), 0.0)
        journal.publish(name, 1, held[name], b"", replaces=True)
    before = _memory()
    index = Index(Peers("own"))
    index.members.set_compared(True)
    longest = [_catch_up(journal, index)]
    size = (_memory() - before) / len(index)
    keys = [key for packed in held.values() for key in unpack(packed)]
    run = [os.urandom(SHORT_KEY) for _ in range(RUN)]
    looking, getting, applying, running = [], [], [], []
    for number in range(RUNS):
        asked = random.Random(number).sample(keys, lookups // 2)
        asked += [os.urandom(SHORT_KEY) for _ in range(lookups // 2)]
        random.Random(number).shuffle(asked)
        plain = dict.fromkeys(keys, 1)
        looking.append(_time(lambda: _look(index.usable_set, asked)) / len(asked) * 1e9)  # noqa: B023
        getting.append(_time(lambda: _look(plain.get, asked)) / len(asked) * 1e9)  # noqa: B023
        for change in range(CHANGES):
            name = names[change % count]
            own, held[name] = held[name][: SHORT_KEY * BATCH], held[name][SHORT_KEY * BATCH :]
            sequence = journal.leases[name].sequence + 1
            journal.publish(name, sequence, os.urandom(SHORT_KEY * BATCH), own)
        applying.append(_time(lambda: longest.append(_catch_up(journal, index))) * 1e3)
        for name in names:
            journal.publish(name, journal.leases[name].sequence + 1, pack(run), b"")
        _catch_up(journal, index)
        running.append(_time(lambda: index.usable_run(run, -1)) * 1e6)
    index.check_integrity()
    return {
        "members": count,
        "bytes": size,
        "lookup_ns": figure(looking),
        "dict_ns": figure(getting),
        "run_us": figure(running),
        "changes_ms": figure(applying),
        "longest_ms": figure(longest),
    }


def _catch_up(journal: Journal, index: Index[Peers]) -> float:
    """Apply what is new. Returns for how many ms, at most, no other thread gets a turn."""
    steps = index.apply_in_pieces(journal.changes_since(index.epoch, index.revision))
    longest, began = 0.0, time.perf_counter()
    while next(steps, began) is None:
        now = time.perf_counter()
        longest, began = max(longest, now - began), now
    return max(longest, time.perf_counter() - began) * 1e3


def _look(look: Callable[[bytes], object], keys: list[bytes]) -> None:
    for key in keys:
        look(key)


def _time(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


# -- from replicas ----------------------------------------------------------------------------


async def _throughput() -> list[dict[str, Any]]:
    found = []
    for count in REPLICAS:
        with MeasuredTracker() as tracker:
            actor = await tracker.actor()
            publishers = [_Publisher(actor, f"publisher {number}") for number in range(count)]
            for publisher in publishers:
                await publisher.join()
            rates = []
            for _ in range(RUNS):
                until = time.monotonic() + SECONDS
                keys = await asyncio.gather(*(each.publish_until(until) for each in publishers))
                rates.append(sum(keys) / SECONDS)
            found.append({"replicas": count, "keys_per_s": figure(rates)})
    return found


class _Publisher:
    """Holds one batch at a time, so that its holdings do not grow."""

    def __init__(self, tracker: Any, name: str) -> None:
        self._tracker = tracker
        self._name = name
        self._sequence = 0
        self._held = b""

    async def join(self) -> None:
        member = Member(self._name, "127.0.0.1:1")
        await self._tracker.join(NAMESPACE, member, Settings())

    async def publish_until(self, end: float) -> int:
        """Publish until `end`; return the number of keys."""
        first = self._sequence
        while time.monotonic() < end:
            self._sequence += 1
            keys = os.urandom(SHORT_KEY * PUBLISHED)
            await self._tracker.publish(NAMESPACE, self._name, self._sequence, keys, self._held)
            self._held = keys
        return (self._sequence - first) * PUBLISHED


# -- to watchers ------------------------------------------------------------------------------


async def _propagation() -> list[dict[str, Any]]:
    found = []
    for count in REPLICAS:
        with MeasuredTracker() as tracker, Watchers(tracker.address, count) as watchers:
            runs = await _runs(tracker, watchers)
            figures = {name: figure([run[name] for run in runs]) for name in _TITLES}
            found.append({"watchers": count, **figures})
            tracker.close()  # first, so that it does not answer watchers that have ended
    return found


async def _runs(tracker: MeasuredTracker, watchers: Watchers) -> list[dict[str, float]]:
    actor = await tracker.actor()
    await actor.join(NAMESPACE, Member(_PUBLISHER, "127.0.0.1:1"), Settings())
    return [
        await _run(actor, 1 + number * PUBLICATIONS, tracker, watchers) for number in range(RUNS)
    ]


async def _run(
    actor: Any, first: int, tracker: MeasuredTracker, watchers: Watchers
) -> dict[str, float]:
    spent = tracker.cpu_seconds(), watchers.cpu_seconds()
    began = time.monotonic()
    await _publish_on_time(actor, first)
    published = time.monotonic() - began
    percentiles = quantiles(watchers.delays(PUBLICATIONS), n=100)
    took = time.monotonic() - began
    return {
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
        "keys_per_s": PUBLICATIONS * _TIMED_KEYS / published,
        "tracker_cores": (tracker.cpu_seconds() - spent[0]) / took,
        "watchers_cores": (watchers.cpu_seconds() - spent[1]) / took,
    }


async def _publish_on_time(actor: Any, first: int) -> None:
    """A call longer than the pause delays those after it."""
    start = time.monotonic()
    for number in range(PUBLICATIONS):
        await asyncio.sleep(max(0.0, start + number * PAUSE - time.monotonic()))
        await actor.publish(NAMESPACE, _PUBLISHER, first + number, stamped(_TIMED_KEYS), b"")


# -- shown ------------------------------------------------------------------------------------

_TITLES = {
    "p50_ms": ("an update arrives, median, ms", 1),
    "p99_ms": ("p99, ms", 1),
    "keys_per_s": ("keys per second", 0),
    "tracker_cores": ("processors of the tracker", 2),
    "watchers_cores": ("of all watchers", 2),
}


_COSTS = {
    "lookup_ns": ("lookup, ns", 0),
    "dict_ns": ("the same in a dictionary", 0),
    "run_us": (f"run of {RUN} chunks that all hold, µs", 0),
    "changes_ms": (f"{CHANGES} changes of {2 * BATCH} keys, ms", 0),
    "longest_ms": ("longest without a turn for other threads, ms", 1),
}


def markdown(part: dict[str, Any]) -> str:
    index = table(
        ("members", "bytes per chunk", *(title for title, _ in _COSTS.values())),
        (
            (
                f"{row['members']}",
                f"{row['bytes']:.0f}",
                *(shown(row[name], n) for name, (_, n) in _COSTS.items()),
            )
            for row in part["holdings"]
        ),
    )
    throughput = table(
        ("replicas", "keys published per second"),
        ((f"{row['replicas']}", shown(row["keys_per_s"], 0)) for row in part["throughput"]),
    )
    propagation = table(
        ("watchers", *(title for title, _ in _TITLES.values())),
        (
            (f"{row['watchers']}", *(shown(row[name], n) for name, (_, n) in _TITLES.items()))
            for row in part["propagation"]
        ),
    )
    return "\n\n".join((index, throughput, propagation))

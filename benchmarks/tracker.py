"""Part `tracker`: what an index of a million keys costs, and how soon its updates arrive.

Publications and lookups are timed in one process, compared with the least that they could cost:
filling a set and looking into a dictionary. Throughput is that of one tracker process while
replicas publish as fast as it answers. Then each publication carries its time, at 10,000 keys a
second, and watchers note when it is in their mirrors: tracker, watchers and publisher run in
processes of their own, but share one machine, unlike in a cluster.
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

from benchmarks.figures import figure, ratio, shown, table
from benchmarks.watchers import KEY_BYTES, NAMESPACE, MeasuredTracker, Watchers, stamped
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.tracker import Member, Settings, unpack
from xinference_xavier.tracker.index import Index

KEYS = 1_000_000
MEMBERS = 5
"""Members that hold the keys in equal parts; each part is a sample."""
BATCH = 1000
"""Keys per publication."""
LOOKUPS = 200_000
REPLICAS = (2, 16, 64)
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
    # What other parts have freed would be used again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        holdings = process.submit(_holdings, KEYS).result()
    return {
        **holdings,
        "throughput": asyncio.run(_throughput()),
        "propagation": asyncio.run(_propagation()),
    }


# -- in one process ---------------------------------------------------------------------------


def _holdings(total: int) -> dict[str, Any]:
    each = total // MEMBERS
    batches = [
        [os.urandom(KEY_BYTES * BATCH) for _ in range(each // BATCH)] for _ in range(MEMBERS)
    ]
    index = Index()
    before = _memory()
    publishing: list[float] = []
    filling: list[float] = []
    for number, own in enumerate(batches):
        name = f"member {number}"
        index.join(Member(name, "127.0.0.1:1"), KEY_BYTES, 0.0)
        publishing.append(each / _time(lambda own=own, name=name: _publish(index, name, own)))  # type: ignore[misc]  # one after the other
        filling.append(each / _time(lambda own=own: _fill(own)))  # type: ignore[misc]
    index_bytes = (_memory() - before) / total
    before = _memory()
    mirror = Mirror("watcher", max_keys=total)
    mirror.apply(index.changes_since("", 0, "watcher"))
    mirror_bytes = (_memory() - before) / total
    assert len(mirror) == total
    looking, getting = _lookups(
        mirror, [key for own in batches for b in own[:2] for key in _keys(b)]
    )
    return {
        "publishes_per_s": figure(publishing),
        "set_per_s": figure(filling),
        "publishes/set": ratio(publishing, filling),
        "lookups_per_s": figure(looking),
        "dict_per_s": figure(getting),
        "lookups/dict": ratio(looking, getting),
        "index_bytes": index_bytes,
        "mirror_bytes": mirror_bytes,
    }


def _publish(index: Index, name: str, batches: list[bytes]) -> None:
    for sequence, batch in enumerate(batches, 1):
        index.publish(name, sequence, batch, b"")


def _fill(batches: list[bytes]) -> None:
    held: set[bytes] = set()
    for batch in batches:
        held.update(_keys(batch))


def _lookups(mirror: Mirror, keys: list[bytes]) -> tuple[list[float], list[float]]:
    """Lookups per second in random order; no member holds half of the keys."""
    asked = random.Random(0).choices(keys, k=LOOKUPS // 2)
    asked += [os.urandom(KEY_BYTES) for _ in range(LOOKUPS // 2)]
    random.Random(1).shuffle(asked)
    plain = dict.fromkeys(keys, 1)
    looking, getting = [], []
    for _ in range(RUNS):
        looking.append(LOOKUPS / _time(lambda: _look(mirror.usable_set, asked)))
        getting.append(LOOKUPS / _time(lambda: _look(plain.get, asked)))
    return looking, getting


def _look(look: Callable[[bytes], object], keys: list[bytes]) -> None:
    for key in keys:
        look(key)


def _keys(batch: bytes) -> list[bytes]:
    return unpack(batch, KEY_BYTES)


def _time(action: Callable[[], None]) -> float:
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
        await self._tracker.join(NAMESPACE, member, KEY_BYTES, Settings())

    async def publish_until(self, end: float) -> int:
        """Publish until `end`; return the number of keys."""
        first = self._sequence
        while time.monotonic() < end:
            self._sequence += 1
            keys = os.urandom(KEY_BYTES * BATCH)
            await self._tracker.publish(NAMESPACE, self._name, self._sequence, keys, self._held)
            self._held = keys
        return (self._sequence - first) * BATCH


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
    await actor.join(NAMESPACE, Member(_PUBLISHER, "127.0.0.1:1"), KEY_BYTES, Settings())
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


def markdown(part: dict[str, Any]) -> str:
    index = table(
        ("in one process", "per second", "the least cost, per second", "ratio"),
        (
            (
                title,
                shown(part[f"{name}_per_s"], 0),
                shown(part[f"{reference}_per_s"], 0),
                shown(part[f"{name}/{reference}"]),
            )
            for title, name, reference in (
                ("keys published; a set filled", "publishes", "set"),
                ("keys looked up in a mirror; in a dictionary", "lookups", "dict"),
            )
        ),
    )
    memory = table(
        ("bytes per key", ""),
        (("tracker", f"{part['index_bytes']:.0f}"), ("mirror", f"{part['mirror_bytes']:.0f}")),
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
    return "\n\n".join((index, memory, throughput, propagation))

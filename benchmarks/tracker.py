"""Part `tracker`: what an index of a million keys costs, and how soon its updates arrive.

Publications and lookups are timed in one process, compared with the least that they could cost:
filling a set and looking into a dictionary. Throughput is that of one tracker process while
replicas publish as fast as it answers. `propagation` measures the way to the watchers.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil

from benchmarks import propagation
from benchmarks.figures import figure, ratio, shown
from benchmarks.watchers import KEY_BYTES, NAMESPACE, TrackerProcess
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.tracker import Member, Settings, unpack
from xinference_xavier.tracker.index import Index

TITLE = "Tracker"
KEYS = 1_000_000
MEMBERS = 5
"""Members that hold the keys in equal parts; each part is a sample."""
BATCH = 1000
"""Keys per publication."""
LOOKUPS = 200_000
REPLICAS = (2, 16, 64)
RUNS = 5
SECONDS = 1.0
"""Seconds per run."""


def measure() -> dict[str, Any]:
    # What other parts have freed would be used again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        holdings = process.submit(_holdings, KEYS).result()
    return {
        **holdings,
        "throughput": asyncio.run(_throughput(REPLICAS)),
        "propagation": asyncio.run(propagation.measure(REPLICAS)),
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
        "index_bytes_per_key": index_bytes,
        "mirror_bytes_per_key": mirror_bytes,
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


async def _throughput(replicas: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for count in replicas:
        with TrackerProcess() as tracker:
            actor = await tracker.actor()
            publishers = [_Publisher(actor, f"publisher {number}") for number in range(count)]
            for publisher in publishers:
                await publisher.join()
            rates = []
            for _ in range(RUNS):
                until = time.monotonic() + SECONDS / 2
                keys = await asyncio.gather(*(each.publish_until(until) for each in publishers))
                rates.append(sum(keys) / (SECONDS / 2))
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


# -- shown ------------------------------------------------------------------------------------


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"One process, {KEYS:,} keys of {KEY_BYTES} bytes, held by {MEMBERS} members, "
        f"published {BATCH} at a time; half of the lookups are of keys that no member holds. "
        "Medians, with minimum and maximum in brackets.",
        "",
        "| | per second | lower bound of the cost | ratio |",
        "|---|---|---|---|",
        _line("keys published", part, "publishes", "set", "filling a set"),
        _line("keys looked up in a mirror", part, "lookups", "dict", "a dictionary's `get`"),
        "",
        f"Memory: {part['index_bytes_per_key']:.0f} bytes per key in the tracker, "
        f"{part['mirror_bytes_per_key']:.0f} in a mirror.",
        "",
        f"Replicas publish to one tracker process as fast as it answers, {BATCH} keys at a time, "
        "and withdraw as many:",
        "",
        "| replicas | keys published per second |",
        "|---|---|",
        *(f"| {row['replicas']} | {shown(row['keys_per_s'], 0)} |" for row in part["throughput"]),
        "",
        propagation.markdown(part["propagation"]),
    ]
    return "\n".join(lines)


def _line(title: str, part: dict[str, Any], name: str, reference: str, words: str) -> str:
    cells = (
        title,
        shown(part[f"{name}_per_s"], 0),
        f"{words}: {shown(part[f'{reference}_per_s'], 0)}",
        shown(part[f"{name}/{reference}"]),
    )
    return f"| {' | '.join(cells)} |"


def plot(part: dict[str, Any], axes: Any) -> None:
    rows = part["throughput"]
    _curve(axes, rows, "replicas", "keys_per_s", "C0")
    axes.set_ylabel("keys published per second", color="C0")
    news = axes.twinx()
    _curve(news, part["propagation"], "watchers", "p99_ms", "C1")
    news.set_ylabel(
        f"p99 ms until an update arrives, {propagation.KEYS_PER_SECOND:,} keys/s", color="C1"
    )
    axes.set_xscale("log", base=2)
    replicas = [row["replicas"] for row in rows]
    axes.set_xticks(replicas, map(str, replicas))
    axes.set_xlabel("replicas")


def _curve(axes: Any, rows: list[dict[str, Any]], x: str, y: str, color: str) -> None:
    middle = [row[y]["median"] for row in rows]
    below = [row[y]["median"] - row[y]["least"] for row in rows]
    above = [row[y]["most"] - row[y]["median"] for row in rows]
    places = [row[x] for row in rows]
    axes.errorbar(places, middle, yerr=[below, above], marker="o", capsize=3, color=color)
    axes.set_ylim(bottom=0)

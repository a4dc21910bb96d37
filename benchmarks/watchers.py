"""A tracker, and replicas that only watch it, in processes of their own."""

import asyncio
import os
import struct
import time
from multiprocessing.connection import Connection
from typing import Any, Self

import xoscar

from tests.harness.remote import Remote, obey_at_once, spawned
from tests.harness.replicas import MODEL, TrackerProcess
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.tracker import (
    SHORT_KEY,
    Change,
    Member,
    Settings,
    Update,
    tracker_uid,
    unpack,
)

NAMESPACE = "namespace"
_STAMP = struct.Struct("!Q")
_LEASE = 3600.0
_PROCESSES = 2  # shared by all watchers


def stamped(count: int) -> bytes:
    """Packed keys that all carry the same time."""
    stamp = _STAMP.pack(time.monotonic_ns())
    return b"".join(stamp + os.urandom(SHORT_KEY - len(stamp)) for _ in range(count))


class MeasuredTracker(TrackerProcess):
    """A tracker whose process begins with nothing: one that is forked from a large one has more to
    look through when it collects garbage."""

    def __init__(self) -> None:
        super().__init__(context=spawned(), lease=_LEASE)

    async def actor(self) -> Any:
        return await xoscar.actor_ref(self.address, tracker_uid(MODEL))


class Watchers:
    """`count` watchers, all up to date once they are made."""

    def __init__(self, tracker: str, count: int) -> None:
        names = [f"watcher {number}" for number in range(count)]
        self._processes = [
            Remote(_watch_all, tracker, names[part::_PROCESSES], context=spawned())
            for part in range(_PROCESSES)
        ]
        for process in self._processes:
            process.wait_until_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.close()

    def delays(self, publications: int) -> list[float]:
        """Delays in ms of all publications since the last call, once each watcher has received this
        many."""
        asked = [process.begin("delays", publications) for process in self._processes]
        return [delay for answer in asked for delay in answer.result()]

    def cpu_seconds(self) -> float:
        """Processor time of all watchers so far."""
        return sum(process.cpu_seconds() for process in self._processes)


class _Watcher:
    """Has only an index. It joins before anything is published."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.joined = asyncio.Event()
        self.delays: list[float] = []

    async def run(self, tracker: Any) -> None:
        index, seen = Index(Peers(self._name)), 0
        await tracker.join(NAMESPACE, Member(self._name, "127.0.0.1:1"), Settings())
        while True:
            update = await tracker.watch(NAMESPACE, self._name, index.epoch, index.revision, 10.0)
            index.apply(update)
            now = time.monotonic_ns()
            new = sorted(stamp for stamp in _stamps(update) if stamp > seen)
            self.delays += [(now - stamp) / 1e6 for stamp in new]
            seen = max([seen, *new])
            self.joined.set()


def _stamps(update: Update) -> set[int]:
    """A publication has one stamp; a full snapshot, for a watcher that is far behind, has many."""
    changes = [news for news in update.news if isinstance(news, Change)]
    once = {_stamp(change.added) for change in changes if change.added and not change.replaces}
    held = (unpack(change.added) for change in changes if change.replaces)
    return once.union(*(map(_stamp, keys) for keys in held))


def _stamp(keys: bytes) -> int:
    stamp: int = _STAMP.unpack_from(keys)[0]
    return stamp


def _watch_all(pipe: Connection, address: str, names: list[str]) -> None:
    async def watch() -> None:
        tracker = await xoscar.actor_ref(address, tracker_uid(MODEL))
        watchers = [_Watcher(name) for name in names]
        tasks = [asyncio.ensure_future(watcher.run(tracker)) for watcher in watchers]
        for watcher in watchers:
            await watcher.joined.wait()
        commands = asyncio.ensure_future(obey_at_once(pipe, _Inside(watchers)))
        await asyncio.wait([commands, *tasks], return_when=asyncio.FIRST_COMPLETED)
        os._exit(0)  # after all calls to the tracker have been answered

    asyncio.run(watch())


class _Inside:
    """Each public method is a command."""

    def __init__(self, watchers: list[_Watcher]) -> None:
        self._watchers = watchers

    async def delays(self, publications: int) -> list[float]:
        while min(len(each.delays) for each in self._watchers) < publications:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # nothing announces updates in transit
        found = [delay for each in self._watchers for delay in each.delays[:publications]]
        for each in self._watchers:
            each.delays.clear()
        return found

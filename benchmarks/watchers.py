"""A tracker, and replicas that only watch it, in processes of their own.

The tracker's process also has a `Bell`, which the same replicas watch. It shows what the calls cost
without content.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import psutil
import xoscar

from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.tracker import Change, Member, Settings, tracker_uid, unpack
from xinference_xavier.runtime.addresses import join_address
from xinference_xavier.tracker.actor import BlockTracker

MODEL, NAMESPACE = "benchmark", "namespace"
BELL = "bell"
KEY_BYTES = 36
_STAMP = struct.Struct("!Q")
_LEASE = 3600.0
_PROCESSES = 2  # shared by all watchers


def stamped(count: int) -> bytes:
    """Packed keys that all carry the same time."""
    stamp = _STAMP.pack(time.monotonic_ns())
    return b"".join(stamp + os.urandom(KEY_BYTES - len(stamp)) for _ in range(count))


class _Process:
    """Runs `main(pipe, …)`, a coroutine function, in a process."""

    def __init__(self, main: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(main, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def seconds(self) -> float:
        """Processor time so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self.pipe.close()
        self._process.join()


def _run(main: Any, pipe: Connection, *arguments: Any) -> None:
    asyncio.run(main(pipe, *arguments))


class TrackerProcess:
    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host

    def __enter__(self) -> Self:
        self._process = _Process(_track, self._host)
        self.address: str = self._process.pipe.recv()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._process.close()

    def seconds(self) -> float:
        return self._process.seconds()

    async def actor(self) -> Any:
        return await xoscar.actor_ref(self.address, tracker_uid(MODEL))

    async def bell(self) -> Any:
        return await xoscar.actor_ref(self.address, BELL)


class Bell(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A tracker without an index: each publication wakes all watchers, with its time only."""

    def __init__(self) -> None:
        super().__init__()
        self._stamps: list[int] = []
        self._rung = asyncio.Event()

    async def publish(
        self, namespace: str, incarnation: str, sequence: int, added: bytes, removed: bytes
    ) -> None:
        self._stamps.append(_stamp(added))
        self._rung.set()
        self._rung = asyncio.Event()

    async def watch(
        self, namespace: str, incarnation: str, epoch: str, revision: int, timeout: float
    ) -> list[int]:
        while len(self._stamps) <= revision:
            await self._rung.wait()
        return self._stamps[revision:]


async def _track(pipe: Connection, host: str) -> None:
    address = join_address(host, 0)
    pool = await xoscar.create_actor_pool(address, n_process=0, use_uvloop=False)
    address = pool.external_address
    uid = tracker_uid(MODEL)
    await xoscar.create_actor(BlockTracker, MODEL, lease=_LEASE, address=address, uid=uid)
    await xoscar.create_actor(Bell, address=address, uid=BELL)
    pipe.send(address)
    await _until_closed(pipe)


class Watchers:
    """`count` watchers, all up to date when the `with` block begins."""

    def __init__(self, tracker: str, count: int) -> None:
        self._tracker = tracker
        self._count = count

    def __enter__(self) -> Self:
        names = [f"{self._count}-{number}" for number in range(self._count)]
        self._processes = [
            _Process(_watch_all, self._tracker, names[part::_PROCESSES])
            for part in range(_PROCESSES)
        ]
        for process in self._processes:
            process.pipe.recv()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.close()

    def delays(self, uid: str, publications: int) -> list[float]:
        """Delays in ms of all publications to the actor since the last call, once each watcher has
        received this many."""
        for process in self._processes:
            process.pipe.send((uid, publications))
        return [delay for process in self._processes for delay in process.pipe.recv()]

    def seconds(self) -> float:
        """Processor time of all watchers so far."""
        return sum(process.seconds() for process in self._processes)


class _Watcher(ABC):
    def __init__(self, name: str) -> None:
        self._name = name
        self.delays: list[float] = []

    @abstractmethod
    async def run(self, actor: Any, joined: asyncio.Event) -> None: ...

    def _note(self, stamps: Iterable[int]) -> None:
        now = time.monotonic_ns()
        self.delays += [(now - stamp) / 1e6 for stamp in stamps]


class _TrackerWatcher(_Watcher):
    """Has only a mirror. It joins before anything is published."""

    async def run(self, actor: Any, joined: asyncio.Event) -> None:
        mirror, seen = Mirror(self._name), 0
        await actor.join(NAMESPACE, Member(self._name, "127.0.0.1:1"), KEY_BYTES, Settings())
        while True:
            update = await actor.watch(NAMESPACE, self._name, mirror.epoch, mirror.revision, 10.0)
            mirror.apply(update)
            new = sorted(stamp for stamp in _stamps(update.changes) if stamp > seen)
            self._note(new)
            seen = max([seen, *new])
            joined.set()


class _BellWatcher(_Watcher):
    async def run(self, actor: Any, joined: asyncio.Event) -> None:
        joined.set()
        heard = 0
        while True:
            stamps = await actor.watch(NAMESPACE, self._name, "", heard, 10.0)
            heard += len(stamps)
            self._note(stamps)


def _stamps(changes: Sequence[Change]) -> set[int]:
    """A publication has one stamp; a full snapshot, for a watcher that is far behind, has many."""
    once = {_stamp(change.added) for change in changes if change.added and not change.replaces}
    held = (unpack(change.added, KEY_BYTES) for change in changes if change.replaces)
    return once.union(*(map(_stamp, keys) for keys in held))


def _stamp(keys: bytes) -> int:
    stamp: int = _STAMP.unpack_from(keys)[0]
    return stamp


async def _watch_all(pipe: Connection, address: str, names: list[str]) -> None:
    watchers: dict[str, list[_Watcher]] = {
        tracker_uid(MODEL): [_TrackerWatcher(name) for name in names],
        BELL: [_BellWatcher(name) for name in names],
    }
    tasks, joined = [], []
    for uid, those in watchers.items():
        actor = await xoscar.actor_ref(address, uid)
        for watcher in those:
            joined.append(asyncio.Event())
            tasks.append(asyncio.ensure_future(watcher.run(actor, joined[-1])))
    for event in joined:
        await event.wait()
    pipe.send(None)
    answering = asyncio.ensure_future(_answer(pipe, watchers))
    await asyncio.wait([answering, *tasks], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0)  # after all calls to the tracker have been answered


async def _answer(pipe: Connection, watchers: dict[str, list[_Watcher]]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            uid, publications = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        those = watchers[uid]
        while min(len(watcher.delays) for watcher in those) < publications:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # nothing announces updates in transit
        pipe.send([delay for watcher in those for delay in watcher.delays[:publications]])
        for watcher in those:
            watcher.delays.clear()


async def _until_closed(pipe: Connection) -> None:
    try:
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    except EOFError:
        os._exit(0)

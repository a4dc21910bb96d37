"""A tracker, and replicas that only watch it, in processes of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import psutil
import xoscar

from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.tracker import Change, Member, Settings, tracker_uid, unpack
from xinference_xavier.tracker.actor import BlockTracker

MODEL, NAMESPACE = "benchmark", "namespace"
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
        self._process = _Process(_track, host)
        self.address: str = self._process.pipe.recv()

    def __enter__(self) -> Self:
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


async def _track(pipe: Connection, host: str) -> None:
    pool = await xoscar.create_actor_pool(f"{host}:0", n_process=0, use_uvloop=False)
    address = pool.external_address
    uid = tracker_uid(MODEL)
    await xoscar.create_actor(BlockTracker, MODEL, lease=_LEASE, address=address, uid=uid)
    pipe.send(address)
    await _until_closed(pipe)


class Watchers:
    """`count` watchers, all up to date once they are made."""

    def __init__(self, tracker: str, count: int) -> None:
        names = [f"watcher {number}" for number in range(count)]
        self._processes = [
            _Process(_watch_all, tracker, names[part::_PROCESSES]) for part in range(_PROCESSES)
        ]
        for process in self._processes:
            process.pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.close()

    def delays(self, publications: int) -> list[float]:
        """Delays in ms of all publications since the last call, once each watcher has received this
        many."""
        for process in self._processes:
            process.pipe.send(publications)
        return [delay for process in self._processes for delay in process.pipe.recv()]

    def seconds(self) -> float:
        """Processor time of all watchers so far."""
        return sum(process.seconds() for process in self._processes)


class _Watcher:
    """Has only a mirror. It joins before anything is published."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.joined = asyncio.Event()
        self.delays: list[float] = []

    async def run(self, tracker: Any) -> None:
        mirror, seen = Mirror(self._name), 0
        await tracker.join(NAMESPACE, Member(self._name, "127.0.0.1:1"), KEY_BYTES, Settings())
        while True:
            update = await tracker.watch(NAMESPACE, self._name, mirror.epoch, mirror.revision, 10.0)
            mirror.apply(update)
            now = time.monotonic_ns()
            new = sorted(stamp for stamp in _stamps(update.changes) if stamp > seen)
            self.delays += [(now - stamp) / 1e6 for stamp in new]
            seen = max([seen, *new])
            self.joined.set()


def _stamps(changes: Sequence[Change]) -> set[int]:
    """A publication has one stamp; a full snapshot, for a watcher that is far behind, has many."""
    once = {_stamp(change.added) for change in changes if change.added and not change.replaces}
    held = (unpack(change.added, KEY_BYTES) for change in changes if change.replaces)
    return once.union(*(map(_stamp, keys) for keys in held))


def _stamp(keys: bytes) -> int:
    stamp: int = _STAMP.unpack_from(keys)[0]
    return stamp


async def _watch_all(pipe: Connection, address: str, names: list[str]) -> None:
    tracker = await xoscar.actor_ref(address, tracker_uid(MODEL))
    watchers = [_Watcher(name) for name in names]
    tasks = [asyncio.ensure_future(watcher.run(tracker)) for watcher in watchers]
    for watcher in watchers:
        await watcher.joined.wait()
    pipe.send(None)
    answering = asyncio.ensure_future(_answer(pipe, watchers))
    await asyncio.wait([answering, *tasks], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0)  # after all calls to the tracker have been answered


async def _answer(pipe: Connection, watchers: list[_Watcher]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            publications = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        while min(len(each.delays) for each in watchers) < publications:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # nothing announces updates in transit
        pipe.send([delay for each in watchers for delay in each.delays[:publications]])
        for each in watchers:
            each.delays.clear()


async def _until_closed(pipe: Connection) -> None:
    try:
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    except EOFError:
        os._exit(0)

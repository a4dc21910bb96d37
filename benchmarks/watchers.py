"""A tracker, and replicas that do nothing but watch it, in processes of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import struct
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import xoscar

from xinference_xavier.tracker.actor import BlockTracker, tracker_uid
from xinference_xavier.tracker.index import Member, Settings, unpack
from xinference_xavier.tracker.mirror import Mirror

MODEL, NAMESPACE = "benchmark", "namespace"
KEY_BYTES = 36
_STAMP = struct.Struct("!Q")
_LEASE = 3600.0
_PROCESSES = 2  # that all watchers share


def stamped(count: int) -> bytes:
    """Packed keys that carry the time, the same in all of them."""
    stamp = _STAMP.pack(time.monotonic_ns())
    return b"".join(stamp + os.urandom(KEY_BYTES - len(stamp)) for _ in range(count))


class _Process:
    """Runs `main(pipe, …)`, a coroutine function; ends with the `with`."""

    def __init__(self, main: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(main, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        self.pipe.close()
        self._process.join()


def _run(main: Any, pipe: Connection, *arguments: Any) -> None:
    asyncio.run(main(pipe, *arguments))


class TrackerProcess:
    def __enter__(self) -> Self:
        self._process = _Process(_track)
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

    async def actor(self) -> Any:
        return await xoscar.actor_ref(self.address, tracker_uid(MODEL))


async def _track(pipe: Connection) -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    address = pool.external_address
    uid = tracker_uid(MODEL)
    await xoscar.create_actor(BlockTracker, MODEL, lease=_LEASE, address=address, uid=uid)
    pipe.send(address)
    await _until_closed(pipe)


class Watchers:
    """`count` of them, all of which have seen what is there when the `with` begins."""

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

    def delays(self, publications: int) -> list[float]:
        """In ms, of all publications since the last call, when each watcher has had this many."""
        for process in self._processes:
            process.pipe.send(publications)
        return [delay for process in self._processes for delay in process.pipe.recv()]


class _Watcher:
    def __init__(self, name: str) -> None:
        self._mirror = Mirror(name)
        self._name = name
        self._seen = 0
        self.delays: list[float] = []

    async def run(self, tracker: Any, joined: asyncio.Event) -> None:
        await tracker.join(NAMESPACE, Member(self._name, "127.0.0.1:1"), KEY_BYTES, Settings())
        while True:
            mirror = self._mirror
            update = await tracker.watch(NAMESPACE, self._name, mirror.epoch, mirror.revision, 10.0)
            mirror.apply(update)
            self._note(update, time.monotonic_ns())
            joined.set()

    def _note(self, update: Any, now: int) -> None:
        stamps = {
            _STAMP.unpack_from(key)[0]
            for change in update.changes
            for key in unpack(change.added, KEY_BYTES)
        }
        new = sorted(stamp for stamp in stamps if stamp > self._seen)
        if self._seen:
            self.delays += [(now - stamp) / 1e6 for stamp in new]
        self._seen = max([self._seen, 1, *new])


async def _watch_all(pipe: Connection, address: str, names: list[str]) -> None:
    tracker = await xoscar.actor_ref(address, tracker_uid(MODEL))
    watchers = [_Watcher(name) for name in names]
    joined = [asyncio.Event() for _ in names]
    tasks = [
        asyncio.ensure_future(watcher.run(tracker, event))
        for watcher, event in zip(watchers, joined, strict=True)
    ]
    for event in joined:
        await event.wait()
    pipe.send(None)
    answering = asyncio.ensure_future(_answer(pipe, watchers))
    await asyncio.wait([answering, *tasks], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0)  # not before all that wait for the tracker have been answered


async def _answer(pipe: Connection, watchers: list[_Watcher]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            publications = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        while min(len(watcher.delays) for watcher in watchers) < publications:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # what is under way is not announced
        pipe.send([delay for watcher in watchers for delay in watcher.delays[:publications]])
        for watcher in watchers:
            watcher.delays.clear()


async def _until_closed(pipe: Connection) -> None:
    try:
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    except EOFError:
        os._exit(0)

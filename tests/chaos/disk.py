"""Faults of the disk that all replicas share: of its files, and of the calls to it.

The calls obey orders, which are files beside the stores' folder.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.processes import until
from xinference_xavier import disk_store
from xinference_xavier.replica import disk as replica_disk

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster
    from tests.chaos.kinds import Kind
    from tests.chaos.schedule import Step

ROWS = 256
"""Less than all documents have, so that rows take each other's places."""
_EFFECT_TIME = 6.0
_PAUSE = 0.01


class DiskOrder(StrEnum):
    HANG = "disk hangs"
    SLOW = "disk is slow"
    FAIL = "disk fails to read"
    FULL = "disk is full"
    TEAR = "disk tears rows"


def obey_orders(parent: Path) -> None:
    """Let this process's calls to stores below `parent` obey orders from now on."""
    read, write = disk_store.Store.read, disk_store.Store.write

    def obeying_read(store: disk_store.Store, key: bytes, row: memoryview) -> int:
        while _ordered(parent, DiskOrder.HANG):
            threading.Event().wait(_PAUSE)
        if _ordered(parent, DiskOrder.SLOW):
            threading.Event().wait(10 * _PAUSE)
        if _ordered(parent, DiskOrder.FAIL):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(store, key, row)

    def obeying_write(store: disk_store.Store, key: bytes, row: memoryview, verified: int) -> bool:
        if _ordered(parent, DiskOrder.FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if _ordered(parent, DiskOrder.TEAR):
            half = len(row) // 2
            torn = mmap.mmap(-1, len(row))  # begins with a page, as writes past the cache require
            torn[half:] = row[half:]
            row = memoryview(torn)
        return write(store, key, row, verified)

    disk_store.Store.read = obeying_read  # type: ignore[method-assign, assignment]
    disk_store.Store.write = obeying_write  # type: ignore[method-assign, assignment]
    replica_disk.MOST_PAUSE = 0.5  # type: ignore[attr-defined]


def _ordered(parent: Path, what: DiskOrder) -> bool:
    return (parent / what).exists()


def _by_order(what: DiskOrder, seen: Callable[[Cluster], int]) -> Kind:
    def inject(cluster: Cluster, step: Step) -> bool:
        order = cluster.disk / what
        before = seen(cluster)
        cluster.damaged_disks += what is DiskOrder.TEAR
        order.touch()
        try:
            found = until(lambda: seen(cluster) > before, _EFFECT_TIME)
            threading.Event().wait(step.strength)
        finally:
            order.unlink()
        return found

    return inject


def _of_files(damage: Callable[[Path, random.Random], None]) -> Kind:
    """Damage the store that was used last, so that a reader notices."""

    def inject(cluster: Cluster, step: Step) -> bool:
        def noticed() -> int:
            return rollbacks(cluster)["checksum"] + _failures(cluster)

        before = noticed()
        with cluster.resets:
            stores = [each.folder for each in disk_store.summaries(cluster.disk) if each.rows > 1]
            if not stores:
                return False
            cluster.damaged_disks += 1
            try:
                damage(stores[0], random.Random(step.number))
            except FileNotFoundError:  # a replica removes what is damaged
                return False
        return until(lambda: noticed() > before, _EFFECT_TIME)

    return inject


def _rows(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.row"))


def _flip(folder: Path, source: random.Random) -> None:
    """A byte in every page."""
    for row in _rows(folder):
        with row.open("r+b") as file:
            for page in range(0, os.fstat(file.fileno()).st_size, 4096):
                file.seek(page + source.randrange(4096))
                file.write(bytes([source.randrange(256)]))


def _swap(folder: Path, _: random.Random) -> None:
    """Give each row the name of the next."""
    rows = _rows(folder)
    first = rows[0].rename(folder / "first")
    for name, row in pairwise(rows):
        row.rename(name)
    first.rename(rows[-1])


def _cut_off(folder: Path, source: random.Random) -> None:
    for row in _rows(folder):
        os.truncate(row, row.stat().st_size // source.randint(2, 20))


def _damage_notes(folder: Path, source: random.Random) -> None:
    for note in folder.glob("*.json"):
        note.write_bytes(source.randbytes(note.stat().st_size))


def _remove(cluster: Cluster, _: Step) -> bool:
    """Remove it as an operator may, without a word to anybody."""
    with cluster.resets:
        stores = [each.folder for each in disk_store.summaries(cluster.disk) if each.rows]
        if not stores:
            return False
        note = stores[0] / "store.json"
        former = note.open()  # so that no other file gets its inode number
        shutil.rmtree(stores[0], ignore_errors=True)  # a replica may save something meanwhile

    def begun_anew() -> bool:
        with suppress(FileNotFoundError):
            return not os.path.samestat(note.stat(), os.fstat(former.fileno()))
        return False

    with former:
        return until(begun_anew, _EFFECT_TIME)


def rollbacks(cluster: Cluster) -> Counter[str]:
    """Why rows could not be read from the disk, and how often."""
    found: Counter[str] = Counter()
    for figures in _figures(cluster):
        found.update(figures["fetches"]["by_transport"].get("disk", {}).get("reasons", {}))
    return found


def _failures(cluster: Cluster) -> int:
    failures: int = sum(figures["disk"]["failures"] for figures in _figures(cluster))
    return failures


def _read(cluster: Cluster) -> int:
    """Bytes."""
    of_disk = [figures["fetches"]["by_transport"].get("disk") for figures in _figures(cluster)]
    return sum(each["bytes"] for each in of_disk if each is not None)


def _written(cluster: Cluster) -> int:
    return sum(figures["disk"]["written_bytes"] for figures in _figures(cluster))


def _figures(cluster: Cluster) -> list[Any]:
    """What each incarnation last reported."""
    reports = (node.figures() for node in cluster.everybody())
    return [report["replica"] for report in reports if "replica" in report]


KINDS: Mapping[str, Kind] = {
    "disk rows flipped": _of_files(_flip),
    "disk rows swapped": _of_files(_swap),
    "disk rows cut off": _of_files(_cut_off),
    "disk notes damaged": _of_files(_damage_notes),
    "disk removed": _remove,
    DiskOrder.HANG: _by_order(DiskOrder.HANG, lambda cluster: rollbacks(cluster)["timeout"]),
    DiskOrder.FAIL: _by_order(DiskOrder.FAIL, lambda cluster: rollbacks(cluster)["disk"]),
    DiskOrder.SLOW: _by_order(DiskOrder.SLOW, _read),
    DiskOrder.FULL: _by_order(DiskOrder.FULL, _failures),
    DiskOrder.TEAR: _by_order(DiskOrder.TEAR, _written),
}

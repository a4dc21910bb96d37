"""Faults of the disk happen, and the controller notices them by what replicas report."""

import mmap
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.chaos import disk
from xinference_xavier.disk_store import DamagedRowError, Store
from xinference_xavier.pool.region import checksum
from xinference_xavier.replica import disk as replica_disk
from xinference_xavier.stats.schema import DiskStats, FetchStats, ReplicaFetches, ReplicaStats


def test_figures_of_the_disk_are_summed_over_all_replicas() -> None:
    of_disk = FetchStats()
    of_disk.ended(None, seconds=0.5, size=100)
    of_disk.ended("checksum", seconds=0.5, size=20)
    reading = ReplicaStats(fetches=ReplicaFetches(by_transport={"disk": of_disk}))
    writing = ReplicaStats(disk=DiskStats(written_bytes=8, failures=2))
    nodes = [
        SimpleNamespace(figures=lambda stats=stats: {"replica": asdict(stats)})
        for stats in (reading, writing)
    ]
    starting = SimpleNamespace(figures=dict)
    cluster: Any = SimpleNamespace(everybody=lambda: [*nodes, starting])
    assert disk.rollbacks(cluster) == {"checksum": 1}
    assert disk._read(cluster) == 120
    assert disk._written(cluster) == 8
    assert disk._failures(cluster) == 2


def test_a_torn_row_is_written_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Store, "read"), (Store, "write"), (replica_disk, "MOST_PAUSE")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    disk.obey_orders(tmp_path)
    (tmp_path / disk.DiskOrder.TEAR).touch()
    store = Store(tmp_path, "namespace", 8192, 1 << 20)
    row = memoryview(mmap.mmap(-1, 8192))
    row[:] = b"x" * 8192
    assert store.write(bytes(36), row, verified=checksum(np.frombuffer(row, np.uint8), bytes(36)))
    with pytest.raises(DamagedRowError):
        store.read(bytes(36), row)

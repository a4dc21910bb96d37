"""Two threads that copy do not stand in each other's way."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from xinference_xavier.pool.copiers import COPIERS, copiers


def processors_of_each() -> list[set[int]]:
    together = Barrier(COPIERS)

    def processors() -> set[int]:
        together.wait()
        return os.sched_getaffinity(0)

    with copiers() as pool:
        asked = [pool.submit(processors) for _ in range(COPIERS)]
        return [each.result() for each in asked]


def test_each_has_processors_of_its_own() -> None:
    first, second = processors_of_each()
    assert first
    assert second
    assert not first & second
    assert first | second == os.sched_getaffinity(0)


def test_where_there_is_one_they_share_it() -> None:
    only = min(os.sched_getaffinity(0))

    def confined() -> list[set[int]]:
        os.sched_setaffinity(0, {only})
        return processors_of_each()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(confined).result() == [{only}, {only}]

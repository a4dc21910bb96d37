"""Threads that copy rows, each on processors of its own.

Two threads that take Python's lock in turns wake each other, and Linux may leave who is woken on
the processor of who woke it, for as long as a whole copy takes: on two processors, 62 MiB in pages
of 128 KiB took 15 ms by one thread, mostly 15 and sometimes 9 by two, and 9 by two kept apart.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

COPIERS = 2


def copiers() -> ThreadPoolExecutor:
    """So many threads, which may run wherever any thread of this process may."""
    numbers = itertools.count()
    processors = sorted(_processors())

    def keep_apart() -> None:
        with suppress(OSError):  # there are too few: it may run where the others do
            os.sched_setaffinity(0, processors[next(numbers) :: COPIERS])

    return ThreadPoolExecutor(COPIERS, "xavier-copy", initializer=keep_apart)


def _processors() -> set[int]:
    """vLLM binds the threads that compute to one processor each, and what others its worker starts
    are bound to that of the first one."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            found |= os.sched_getaffinity(int(thread))
    return found

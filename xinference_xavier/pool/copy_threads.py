"""Threads that copy rows, each on its own processors.

Two threads that alternate on Python's lock wake each other, and Linux may keep both on one
processor for as long as a copy takes. On two processors, 62 MiB in pages of 128 KiB took one thread
15 ms; two threads mostly 15, sometimes 9; two threads kept apart 9.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

COPY_THREADS = 2


def copy_threads() -> ThreadPoolExecutor:
    """`COPY_THREADS` threads that divide this process's processors among them."""
    numbers = itertools.count()
    processors = sorted(_processors())

    def keep_apart() -> None:
        with suppress(OSError):  # too few processors: let the threads share them
            os.sched_setaffinity(0, processors[next(numbers) :: COPY_THREADS])

    return ThreadPoolExecutor(COPY_THREADS, "xavier-copy", initializer=keep_apart)


def _processors() -> set[int]:
    """The processors of all threads: vLLM binds each computing thread to one processor, and every
    other thread of its worker to the first one's."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            found |= os.sched_getaffinity(int(thread))
    return found

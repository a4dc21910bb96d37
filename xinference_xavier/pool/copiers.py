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
    """So many threads; what they may run on is what whoever gives them their work may."""
    numbers = itertools.count()

    def keep_apart() -> None:
        processors = sorted(os.sched_getaffinity(0))
        with suppress(OSError):  # there are too few: it may run where the others do
            os.sched_setaffinity(0, processors[next(numbers) :: COPIERS])

    return ThreadPoolExecutor(COPIERS, "xavier-copy", initializer=keep_apart)

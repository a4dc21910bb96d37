"""CPU time of the threads of an engine's process, by name.

This extends vLLM's worker, which runs in that process here. The kernel does not know Python's
thread names, so the process itself is asked.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class ThreadTimes:
    """vLLM mixes this into the worker through `worker_extension_cls`."""

    def benchmark_threads(self) -> dict[str, float]:
        return seconds_by_name()


def seconds_by_name() -> dict[str, float]:
    """CPU seconds of this process's threads, summed by name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        stat = Path(f"/proc/self/task/{thread.native_id}/stat")
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS  # user and system
        found[thread.name] = found.get(thread.name, 0.0) + seconds
    return found

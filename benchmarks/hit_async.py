"""Part `hit_async`: part `hit` with engines that schedule asynchronously, as on GPUs.

Each engine schedules a step before it has the output of the previous one, which a worker computes
in a process of its own.
"""

from __future__ import annotations

from typing import Any

from benchmarks import hit

TITLE = "Hits, scheduled asynchronously"
LENGTHS = (4000,)
ROUNDS = 5
QUICK = {"LENGTHS": (1000,)}
markdown = hit.markdown
plot = hit.plot


def measure() -> dict[str, Any]:
    return hit.measure_of(LENGTHS, ROUNDS, asynchronous=True)

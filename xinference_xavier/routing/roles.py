"""Leaves long prefills of decode replicas to a prefill replica.

A prefill that a decode replica computes itself makes all requests wait that it is answering. If a
prefill replica computes it, the decode replica fetches the chunks meanwhile, and only this request
waits, perhaps longer. Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xinference_xavier.routing.choice import Chunks, Forecast, Prefill
from xinference_xavier.routing.load import Loads


def with_prefill_replicas(
    loads: Loads, found: Forecast, size: Chunks, threshold: int | None
) -> Forecast:
    """`found` as it is where decode replicas leave the prefill to the earliest prefill replica, if
    that pays.

    It does if the request waits less longer than the requests in the decode replica would wait
    together, or if more than `threshold` tokens are missing; but never if the prefill replica's
    queue takes longer than computing.
    """
    finish = np.where(loads.prefills, found.total, np.inf)
    if not finish.size or finish.min() == np.inf:
        return found
    number = int(finish.argmin())
    queue = float(found.backlog[number])
    _, _, fetch_s, byte_s = loads.rates
    whole = found.prompt.tokens // size.tokens
    moving = queue + byte_s * (size.bytes * np.maximum(whole - found.runs, 0))
    is_open = np.isfinite(found.backlog)
    backlog = np.where(is_open, found.backlog, 0.0)
    answer = np.maximum(backlog, np.maximum(finish[number], moving) + fetch_s)
    if threshold is None:
        here = backlog + found.fetch + found.compute
        pays = answer - here < found.compute * loads.running
    else:
        pays = found.prompt.tokens - found.runs * size.tokens > threshold
    pays &= loads.decodes & is_open & (queue <= found.compute)
    if not pays.any():
        return found
    return replace(
        found,
        fetch=np.where(pays, answer - backlog, found.fetch),
        compute=np.where(pays, 0.0, found.compute),
        prefill=Prefill(loads.names[number], queue, float(finish[number]) - queue),
        left=pays,
    )

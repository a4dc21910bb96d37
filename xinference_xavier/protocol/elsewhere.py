"""How a router tells a decode replica that another replica prefills a request: in the request's id,
which is the only thing that all versions of xinference hand through to vLLM unchanged.

A client could write such an id. Then its own request waits a little, at most.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MARK = re.compile(r":prefill:([^:]{1,256}):(\d{1,9}):(\d{1,9})", re.ASCII)


class Elsewhere(NamedTuple):
    """`replica` is the incarnation of the one that prefills. It begins after about `queue` seconds,
    and takes about `seconds`."""

    replica: str
    queue: float
    seconds: float


def with_mark(request: str, elsewhere: Elsewhere) -> str:
    replica, queue, seconds = elsewhere
    return f"{request}:prefill:{replica}:{queue * 1000:.0f}:{seconds * 1000:.0f}"


def mark_of(request: str) -> Elsewhere | None:
    """`request` is an id, to which vLLM may have added something."""
    match = _MARK.search(request)
    if match is None:
        return None
    return Elsewhere(match[1], int(match[2]) / 1000, int(match[3]) / 1000)

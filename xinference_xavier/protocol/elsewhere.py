"""How a router tells a decode replica that another replica prefills a request: in the request's id,
which is the only thing that all versions of xinference hand through to vLLM unchanged.

Clients choose ids, too. So a mark is signed with a key that the decode replica makes, and that only
routers learn (`Serving.mark_key`).
"""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

MAX_SECONDS = 600.0
"""A decode replica waits no longer than that for a prefill to begin, and to end."""
_MARK = re.compile(r":prefill:([^:]{1,256}):(\d{1,6}):(\d{1,6}):([0-9a-f]{32})", re.ASCII)


class Elsewhere(NamedTuple):
    """`replica` is the incarnation of the one that prefills. It begins after about `queue` seconds,
    and takes about `seconds`."""

    replica: str
    queue: float
    seconds: float


def with_mark(request: str, elsewhere: Elsewhere, key: str) -> str:
    """`key` is that of the replica that decodes."""
    queue, seconds = (min(each, MAX_SECONDS) * 1000 for each in elsewhere[1:])
    mark = f"{elsewhere.replica}:{queue:.0f}:{seconds:.0f}"
    return f"{request}:prefill:{mark}:{_signature(mark, key)}"


def mark_of(request: str, key: str) -> Elsewhere | None:
    """`request` is an id, to which vLLM may have added something. None unless its mark is signed
    with `key`."""
    match = _MARK.search(request)
    if match is None:
        return None
    replica, queue, seconds, signature = match.groups()
    if not hmac.compare_digest(signature, _signature(f"{replica}:{queue}:{seconds}", key)):
        return None
    return Elsewhere(replica, int(queue) / 1000, int(seconds) / 1000)


def _signature(mark: str, key: str) -> str:
    return hmac.digest(key.encode(), mark.encode(), "sha256").hex()[:32]

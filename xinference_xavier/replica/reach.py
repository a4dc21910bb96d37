"""Which transports to try with a peer, best first.

A transport within one host is tried with peers whose `host_identity` equals ours. One that fails
with a peer while another one works is tried again after a minute, then after doubled times; at once
if the peer has another transfer process.

Threading: the replica's background loop.
"""

import logging
import time
from collections.abc import Iterable

from xinference_xavier.errors import OUT_OF_REACH, OutOfReachError
from xinference_xavier.peers import Peer
from xinference_xavier.protocol.transfer import Endpoint, Started
from xinference_xavier.runtime.backoff import Outage

logger = logging.getLogger(__name__)

RETRY_AFTER, MAX_RETRY_AFTER = 60.0, 960.0
"""Seconds until a transport that failed is tried again; doubled with each failure."""
MEMORY_NOT_SHARED, DIFFERENCES = OUT_OF_REACH[0], OUT_OF_REACH[1:]
"""`DIFFERENCES` are in the order of the parts of a `host_identity`."""


def meet(peer: Peer, endpoint: Endpoint) -> None:
    """The peer has said where its transfer process is."""
    if endpoint != peer.endpoint:
        peer.endpoint = endpoint
        peer.broken.clear()


def transports(own: Started, peer: Peer) -> tuple[str, ...]:
    """What our transfer process, which has `own`, tries with the peer. Raises OutOfReachError."""
    against = obstacles(own, peer)
    if possible := tuple(name for name in own.transports if name not in against):
        return possible
    raise OutOfReachError(" or ".join(own.transports), next(reversed(against.values())))


def obstacles(own: Started, peer: Peer) -> dict[str, str]:
    """The reasons against transports, for each that is not tried with the peer."""
    now, found = time.monotonic(), dict(own.unusable)
    theirs = None if peer.endpoint is None else peer.endpoint.host
    for name, host in own.transports.items():
        outage = peer.broken.get(name)
        if host is not None and (reason := difference(host, theirs)):
            found[name] = reason
        elif outage is not None and now < outage.until:
            found[name] = outage.reason
    return found


def fell_back(peer: Peer, failed: Iterable[tuple[str, str]]) -> None:
    """These transports failed with the peer, for these reasons, and another one worked."""
    now = time.monotonic()
    for name, reason in failed:
        outage = peer.broken.setdefault(name, Outage(RETRY_AFTER, MAX_RETRY_AFTER))
        outage.fail(now, reason)
        logger.warning(
            "%s failed with donor %s; falling back for %.0f s: error=%s",
            name,
            peer.name,
            outage.until - now,
            reason,
        )


def difference(own: str, theirs: str | None) -> str | None:
    """Why a process on that host cannot share its memory with us; None if it can."""
    if theirs is None:
        return MEMORY_NOT_SHARED
    parts = zip(DIFFERENCES, own.split(" "), theirs.split(" "), strict=False)
    different = (name for name, ours, its in parts if ours != its)
    return None if own == theirs else next(different, DIFFERENCES[0])

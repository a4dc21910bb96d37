"""Whether what a peer holds is had sooner by fetching or by computing it, by what both took so far.

Belongs to the scheduler thread; `report` may be called by any. Times are monotonic seconds.

What is not known speaks for fetching, which measures it: the first fetch from a peer, which opens
a link besides, and its first over a transport. A forecast that speaks against it is believed for
`BELIEVED` seconds after the last fetch from that peer. Then one is made all the same, and what was
known before is forgotten for it: so what was slow for a while is tried again. A fetch that brought
nothing measures nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict
from typing import Any, NamedTuple

from xinference_xavier.engine.policy.fetch_rate import NEVER, FetchRate
from xinference_xavier.replica.fetcher import Fetch
from xinference_xavier.stats.schema import Decisions

BELIEVED = 30.0
_MAX_PEERS = 100


class _Begun(NamedTuple):
    at: float
    expected: float | None
    computing: float | None


class _Peer:
    def __init__(self) -> None:
        self.tried = 0.0  # when the last fetch began
        self.measured = 0.0  # when the last one that was measured began
        self.transport = ""  # of that one
        self.rates: dict[str, FetchRate | None] = {}  # by transport; None after the first fetch


class CostModel:
    def __init__(self, *, row_bytes: int) -> None:
        self.choices = Decisions()
        self._row_bytes = row_bytes
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # the last one tried is the last
        self._begun: dict[Fetch, _Begun] = {}

    def least(
        self, donor: str, rows_per_chunk: int, chunk_seconds: float | None, now: float
    ) -> int:
        """How many chunks are worth a fetch from `donor`, if each takes so long to be computed;
        NEVER if none are."""
        rate = self._believed(donor, now)
        if rate is None or chunk_seconds is None:
            return 1
        return rate.least(rows_per_chunk, chunk_seconds)

    def rows_within(self, donor: str, seconds: float, now: float) -> int:
        """How many rows of `donor`'s can be had in so many seconds."""
        rate = self._believed(donor, now)
        return NEVER if rate is None else rate.rows_within(seconds)

    def seconds(self, donor: str, rows: int, now: float) -> float:
        """That fetching so many rows from `donor` takes; 0 if nothing is known."""
        rate = self._believed(donor, now)
        return 0.0 if rate is None else rate.seconds(rows)

    def last_seconds(self, donor: str, rows: int) -> float:
        """The same by what was known last, however long ago; infinite if nothing ever was."""
        rate = self._last(donor)
        return math.inf if rate is None else rate.seconds(rows)

    def _believed(self, donor: str, now: float) -> FetchRate | None:
        peer = self._peers.get(donor)
        return None if peer is None or now - peer.tried > BELIEVED else self._last(donor)

    def _last(self, donor: str) -> FetchRate | None:
        peer = self._peers.get(donor)
        return None if peer is None else peer.rates.get(peer.transport)

    def begun(self, fetch: Fetch, computing: float | None, now: float) -> None:
        """A fetch that spares so many seconds of computing."""
        rate = self._believed(fetch.donor, now)
        expected = None if rate is None else rate.seconds(len(fetch.rows))
        self._begun[fetch] = _Begun(now, expected, computing)
        self._peers.setdefault(fetch.donor, _Peer()).tried = now
        self._peers.move_to_end(fetch.donor)
        if len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)

    def ended(self, fetch: Fetch) -> None:
        """Does nothing but the first time for each fetch."""
        begun = self._begun.pop(fetch, None)
        peer = self._peers.get(fetch.donor)
        if begun is None or peer is None or not fetch.committed:
            return
        self._learn(peer, fetch, begun.at)
        choices = self.choices
        if begun.computing is not None and fetch.seconds > begun.computing:
            choices.slower_than_prefill += 1
        if begun.expected is not None and len(fetch.committed) == len(fetch.rows):
            choices.predictions += 1
            choices.predicted_s += begun.expected
            choices.took_s += fetch.seconds
            choices.error_s += abs(fetch.seconds - begun.expected)

    def _learn(self, peer: _Peer, fetch: Fetch, began: float) -> None:
        known = fetch.transport in peer.rates
        stale = began - peer.measured > BELIEVED
        peer.measured, peer.transport = max(began, peer.measured), fetch.transport
        if not known:  # it opened the link
            peer.rates[fetch.transport] = None
            return
        rate = peer.rates[fetch.transport]
        if rate is None or stale:
            rate = peer.rates[fetch.transport] = FetchRate()
        rate.add(len(fetch.committed), fetch.seconds)

    def report(self) -> dict[str, Any]:
        """JSON-able: `choices`, and by peer, how fast it is over the transport it was seen with."""
        rates = {}
        for donor, peer in list(self._peers.items()):
            rate = peer.rates.get(peer.transport)
            if rate is not None:
                line = rate.lines[0]
                rates[donor] = {
                    "transport": peer.transport,
                    "overhead_s": line.overhead,
                    "bytes_per_s": self._row_bytes / line.each if line.each else None,
                }
        return {**asdict(self.choices), "rates": rates}

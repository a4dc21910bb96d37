"""Predicts whether it is faster to fetch a prefix from a peer or to compute it.

Belongs to the scheduler thread; any thread may call `report`. Times are monotonic seconds.

Unknown costs favour fetching, because a fetch measures them. The first fetch over each transport
opens a link and is not measured, nor is a fetch that brought nothing.

A rate that speaks against a peer holds for `RETRY_AFTER` seconds after the last fetch from it. The
next fetch is made anyway and replaces the rate, so a peer that was slow for a while is tried again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from xinference_xavier.engine.policy.fetch_rate import INFINITE, FetchRate
from xinference_xavier.stats.schema import Decisions
from xinference_xavier.tiers.base import Fetch

RETRY_AFTER = 30.0
_MAX_PEERS = 100


class _Prediction(NamedTuple):
    began: float
    fetch_seconds: float | None
    prefill_seconds: float | None


@dataclass
class _Peer:
    tried: float = 0.0  # when the latest fetch began
    measured: float = 0.0  # when the latest measured fetch began
    transport: str = ""  # of the latest measured fetch
    # By transport; None after the first fetch.
    rates: dict[str, FetchRate | None] = field(default_factory=dict)

    @property
    def rate(self) -> FetchRate | None:
        return self.rates.get(self.transport)


class CostModel:
    def __init__(self, *, row_bytes: int) -> None:
        self.decisions = Decisions()
        self._row_bytes = row_bytes
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # the latest tried is last
        self._pending: dict[Fetch, _Prediction] = {}

    def rows_within(self, donor: str, seconds: float, now: float) -> int:
        """How many rows `donor` sends in `seconds`; INFINITE if unknown."""
        rate = self._rate(donor, now)
        return INFINITE if rate is None else rate.rows_within(seconds)

    def seconds(self, donor: str, rows: int, now: float) -> float:
        """Predict how long a fetch from `donor` takes; 0 if unknown."""
        rate = self._rate(donor, now)
        return 0.0 if rate is None else rate.seconds(rows)

    def last_seconds(self, donor: str, rows: int) -> float:
        """Like `seconds`, from the last known rate however old; infinite without one."""
        peer = self._peers.get(donor)
        return math.inf if peer is None or peer.rate is None else peer.rate.seconds(rows)

    def _rate(self, donor: str, now: float) -> FetchRate | None:
        peer = self._peers.get(donor)
        return None if peer is None or now - peer.tried > RETRY_AFTER else peer.rate

    def begun(self, fetch: Fetch, prefill_seconds: float | None, now: float) -> None:
        """A fetch began that saves `prefill_seconds` of computing."""
        rate = self._rate(fetch.source, now)
        fetch_seconds = None if rate is None else rate.seconds(len(fetch.rows))
        self._pending[fetch] = _Prediction(now, fetch_seconds, prefill_seconds)
        self._peers.setdefault(fetch.source, _Peer()).tried = now
        self._peers.move_to_end(fetch.source)
        if len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)

    def ended(self, fetch: Fetch) -> None:
        """Learn from the fetch; further calls for it do nothing."""
        prediction = self._pending.pop(fetch, None)
        peer = self._peers.get(fetch.source)
        if prediction is None or peer is None or not fetch.committed:
            return
        self._learn(peer, fetch, prediction.began)
        decisions, (_, predicted, prefill) = self.decisions, prediction
        if prefill is not None and fetch.seconds > prefill:
            decisions.slower_than_prefill += 1
        if predicted is not None and len(fetch.committed) == len(fetch.rows):
            decisions.predictions += 1
            decisions.predicted_s += predicted
            decisions.actual_s += fetch.seconds
            decisions.error_s += abs(fetch.seconds - predicted)

    def _learn(self, peer: _Peer, fetch: Fetch, began: float) -> None:
        stale = began - peer.measured > RETRY_AFTER
        peer.measured, peer.transport = max(began, peer.measured), fetch.transport
        if fetch.transport not in peer.rates:  # this fetch opened the link
            peer.rates[fetch.transport] = None
            return
        rate = FetchRate() if peer.rate is None or stale else peer.rate
        rate.add(len(fetch.committed), fetch.seconds)
        peer.rates[fetch.transport] = rate  # `report` never sees an empty one

    def report(self) -> dict[str, Any]:
        """`Decisions`, and `rates` by peer over its latest transport; JSON-able."""
        rates = {}
        for donor, peer in list(self._peers.items()):
            rate = peer.rate
            if rate is not None:
                line = rate.lines[0]
                rates[donor] = {
                    "transport": peer.transport,
                    "overhead_s": line.overhead,
                    "bytes_per_s": self._row_bytes / line.per_row if line.per_row else None,
                }
        return {**asdict(self.decisions), "rates": rates}

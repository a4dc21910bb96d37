"""Predicts how long fetches from each peer take, and which peers to leave out.

Belongs to the scheduler thread; any thread may call `report`. Times are monotonic seconds.
`docs/fetch-or-compute.md` says what the predictions are used for.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from xinference_xavier.engine.policy.linear_fit import LinearFit
from xinference_xavier.stats.schema import Decisions
from xinference_xavier.tiers.base import Fetch

RETRY_AFTER = 30.0
"""Seconds after the last fetch from a peer for which its rate counts."""
MAX_FAILURES = 2  # in a row, before a peer is left out
MAX_PAUSE = 60.0  # seconds between two probes
_BLAMELESS = frozenset({"not held", "not compared", "donor gone", "reset", "stopped"})
"""Reasons for which a fetch is rolled back that say nothing about the donor."""
_PATIENCE, _MIN_PATIENCE = 4.0, 1.0  # predictions and seconds that a fetch may take
_MAX_PEERS, _MAX_REPORTED = 1000, 100
_UNKNOWN = LinearFit()


class _Prediction(NamedTuple):
    fetch_seconds: float  # 0 if unknown
    prefill_seconds: float | None
    began: float


@dataclass
class _Peer:
    tried: float = 0.0  # when the latest fetch began
    measured: float = 0.0  # when the latest measured fetch began
    transport: str = ""  # of the latest measured fetch
    rates: dict[str, LinearFit] = field(default_factory=dict)  # seconds over rows, by transport
    failures: int = 0  # in a row
    probe_at: float = 0.0  # if it is left out
    reason: str = ""  # of the latest failure

    @property
    def rate(self) -> LinearFit:
        return self.rates.get(self.transport, _UNKNOWN)


class CostModel:
    def __init__(self, *, row_bytes: int) -> None:
        self.decisions = Decisions()
        self._row_bytes = row_bytes
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # the latest tried is last
        self._pending: dict[Fetch, _Prediction] = {}
        self._left_out: dict[str, _Peer] = {}

    def rate(self, donor: str, now: float = -math.inf) -> LinearFit:
        """Seconds over rows of fetches from `donor`; empty if unknown, so that it predicts 0.

        Without `now`, it counts however old it is."""
        peer = self._peers.get(donor)
        return _UNKNOWN if peer is None or now - peer.tried > RETRY_AFTER else peer.rate

    def patience(self, donor: str, rows: int, now: float) -> float:
        """How many seconds to wait for a fetch from `donor`; infinite if its rate is unknown."""
        rate = self.rate(donor, now)
        return max(_MIN_PATIENCE, _PATIENCE * rate.predict(rows)) if rate else math.inf

    def measured(self, now: float) -> list[str]:
        """The peers whose rates are known, the latest tried first."""
        latest = reversed(self._peers.items())
        recent = takewhile(lambda each: now - each[1].tried <= RETRY_AFTER, latest)
        return [name for name, peer in recent if peer.rate]

    def left_out(self, probe_by: float = math.inf) -> list[str]:
        """The peers that are left out and may be probed at the time `probe_by`."""
        return [name for name, peer in self._left_out.items() if peer.probe_at <= probe_by]

    def begun(self, fetch: Fetch, prefill_seconds: float | None, now: float) -> None:
        """A fetch began that saves `prefill_seconds` of computing, if that is known."""
        predicted = self.rate(fetch.source, now).predict(len(fetch.rows))
        self._pending[fetch] = _Prediction(predicted, prefill_seconds, now)
        peer = self._peers.setdefault(fetch.source, _Peer())
        peer.tried = now
        peer.probe_at = math.inf  # not before this one has ended
        self._peers.move_to_end(fetch.source)
        if len(self._peers) > _MAX_PEERS:
            oldest, _ = self._peers.popitem(last=False)
            self._left_out.pop(oldest, None)

    def ended(self, fetch: Fetch, now: float) -> None:
        """Learn from the fetch; further calls for it do nothing."""
        prediction, peer = self._pending.pop(fetch, None), self._peers.get(fetch.source)
        if prediction is None or peer is None:
            return
        if not fetch.committed:
            self._failed(peer, fetch, now)
            return
        if self._left_out.pop(fetch.source, None):
            peer.rates.clear()
        peer.failures = 0
        self._learn(peer, fetch, prediction.began)
        decisions, (predicted, prefill, _) = self.decisions, prediction
        decisions.slower_than_prefill += prefill is not None and fetch.seconds > prefill
        if predicted and len(fetch.committed) == len(fetch.rows):
            decisions.predictions += 1
            decisions.predicted_s += predicted
            decisions.actual_s += fetch.seconds
            decisions.error_s += abs(fetch.seconds - predicted)

    def _failed(self, peer: _Peer, fetch: Fetch, now: float) -> None:
        if fetch.reason not in _BLAMELESS:
            peer.failures += 1
            peer.reason = fetch.reason or ""
            if peer.rate:
                peer.rate.add(len(fetch.rows), fetch.seconds)
        if peer.failures >= MAX_FAILURES:
            doublings = min(peer.failures - MAX_FAILURES, 6)
            peer.probe_at = now + min(2.0**doublings, MAX_PAUSE)
            self._left_out[fetch.source] = peer

    def _learn(self, peer: _Peer, fetch: Fetch, began: float) -> None:
        opened_link = fetch.transport not in peer.rates
        stale = began - peer.measured > RETRY_AFTER
        peer.measured, peer.transport = max(began, peer.measured), fetch.transport
        if opened_link or stale:
            peer.rates[fetch.transport] = LinearFit()
        if not opened_link:
            peer.rate.add(len(fetch.committed), fetch.seconds)

    def report(self) -> dict[str, Any]:
        """`Decisions` as JSON."""
        rates = {}
        for donor, peer in [*self._peers.items()][-_MAX_REPORTED:]:
            if rate := peer.rate:
                per_row = rate.y / rate.x if rate.slope is None else rate.slope
                rates[donor] = {
                    "transport": peer.transport,
                    "overhead_s": rate.y - per_row * rate.x,
                    "bytes_per_s": self._row_bytes / per_row if per_row else None,
                }
        left_out = [*self._left_out.items()][-_MAX_REPORTED:]
        reasons = {donor: peer.reason for donor, peer in left_out}
        return {**asdict(self.decisions), "rates": rates, "left_out": reasons}

"""Predicts whether it is faster to fetch a prefix from a peer or to compute it.

Belongs to the scheduler thread; any thread may call `report`. Times are monotonic seconds.

A fetch from a peer takes an overhead plus a time per row: a line through the latest fetches over
the transport that it used last. Unknown costs favour fetching, because a fetch measures them. The
first fetch over each transport opens a link and is not measured. A rate that speaks against a peer
holds for `RETRY_AFTER` seconds after the last fetch from it. The next fetch is made anyway and
replaces the rate, so a peer that was slow for a while is tried again.

A failed fetch counts as the time that it took. After two in a row the peer is left out for 1, 2, 4
… 60 seconds. Then one probe, a fetch that nobody waits for, shows whether it is well again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from xinference_xavier.engine.policy.linear_fit import LinearFit
from xinference_xavier.stats.schema import Decisions
from xinference_xavier.tiers.base import Fetch

RETRY_AFTER = 30.0
MAX_FAILURES = 2
MAX_PAUSE = 60.0
_BLAMELESS = frozenset({"not held", "not compared", "donor gone", "reset", "stopped"})
"""Reasons for which a fetch is rolled back that say nothing about the donor."""
_PATIENCE = 4.0  # a fetch may take so many times its prediction
_MIN_PATIENCE = 1.0
_MAX_PEERS = 1000
_MAX_REPORTED = 100


class _Prediction(NamedTuple):
    fetch_seconds: float | None
    prefill_seconds: float | None
    began: float


@dataclass
class _Peer:
    tried: float = 0.0  # when the latest fetch began
    measured: float = 0.0  # when the latest measured fetch began
    transport: str = ""  # of the latest measured fetch
    # Seconds over rows, by transport; None after the first fetch.
    rates: dict[str, LinearFit | None] = field(default_factory=dict)
    failures: int = 0  # in a row
    probe_at: float = 0.0  # if it is left out
    reason: str = ""  # of the latest failure

    @property
    def rate(self) -> LinearFit | None:
        return self.rates.get(self.transport)

    @property
    def left_out(self) -> bool:
        return self.failures >= MAX_FAILURES


class CostModel:
    def __init__(self, *, row_bytes: int) -> None:
        self.decisions = Decisions()
        self._row_bytes = row_bytes
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # the latest tried is last
        self._pending: dict[Fetch, _Prediction] = {}
        self._left_out: dict[str, _Peer] = {}

    def rows_within(self, donor: str, seconds: float, now: float) -> float:
        """How many rows `donor` sends in `seconds`; infinite if unknown."""
        rate = self._rate(donor, now)
        return math.inf if rate is None else rate.largest(seconds)

    def seconds(self, donor: str, rows: int, now: float) -> float:
        """Predict how long a fetch from `donor` takes; 0 if unknown."""
        rate = self._rate(donor, now)
        return 0.0 if rate is None else rate.predict(rows)

    def last_seconds(self, donor: str, rows: int) -> float:
        """Like `seconds`, from the last known rate however old; infinite without one."""
        peer = self._peers.get(donor)
        return math.inf if peer is None or peer.rate is None else peer.rate.predict(rows)

    def patience(self, donor: str, rows: int, now: float) -> float:
        """How many seconds to wait for a fetch from `donor`; infinite if its rate is unknown."""
        rate = self._rate(donor, now)
        return math.inf if rate is None else max(_MIN_PATIENCE, _PATIENCE * rate.predict(rows))

    def measured(self, now: float) -> list[str]:
        """The peers whose rates are known, the latest tried first."""
        names = []
        for name, peer in reversed(self._peers.items()):
            if now - peer.tried > RETRY_AFTER:
                break
            if peer.rate is not None:
                names.append(name)
        return names

    def left_out(self, probe_by: float = math.inf) -> list[str]:
        """The peers that are left out and may be probed at the time `probe_by`."""
        return [name for name, peer in self._left_out.items() if peer.probe_at <= probe_by]

    def _rate(self, donor: str, now: float) -> LinearFit | None:
        peer = self._peers.get(donor)
        return None if peer is None or now - peer.tried > RETRY_AFTER else peer.rate

    def begun(self, fetch: Fetch, prefill_seconds: float | None, now: float) -> None:
        """A fetch began that saves `prefill_seconds` of computing; None: nobody waits for it."""
        rate = self._rate(fetch.source, now)
        fetch_seconds = None if rate is None else rate.predict(len(fetch.rows))
        self._pending[fetch] = _Prediction(fetch_seconds, prefill_seconds, now)
        peer = self._peers.setdefault(fetch.source, _Peer())
        peer.tried = now
        if peer.left_out:
            peer.probe_at = math.inf  # until this one has ended
        self._peers.move_to_end(fetch.source)
        if len(self._peers) > _MAX_PEERS:
            oldest, _ = self._peers.popitem(last=False)
            self._left_out.pop(oldest, None)

    def ended(self, fetch: Fetch, now: float) -> None:
        """Learn from the fetch; further calls for it do nothing."""
        prediction = self._pending.pop(fetch, None)
        peer = self._peers.get(fetch.source)
        if prediction is None or peer is None:
            return
        if not fetch.committed:
            self._failed(peer, fetch, now)
            return
        if peer.left_out:
            peer.rates.clear()
            del self._left_out[fetch.source]
        peer.failures = 0
        self._learn(peer, fetch, prediction.began)
        decisions, (predicted, prefill, _) = self.decisions, prediction
        if prefill is not None and fetch.seconds > prefill:
            decisions.slower_than_prefill += 1
        if predicted is not None and len(fetch.committed) == len(fetch.rows):
            decisions.predictions += 1
            decisions.predicted_s += predicted
            decisions.actual_s += fetch.seconds
            decisions.error_s += abs(fetch.seconds - predicted)

    def _failed(self, peer: _Peer, fetch: Fetch, now: float) -> None:
        if fetch.reason not in _BLAMELESS:
            peer.failures += 1
            peer.reason = fetch.reason or ""
            if peer.rate is not None:
                peer.rate.add(len(fetch.rows), fetch.seconds)
        if peer.left_out:
            doublings = min(peer.failures - MAX_FAILURES, 6)
            peer.probe_at = now + min(2.0**doublings, MAX_PAUSE)
            self._left_out[fetch.source] = peer

    def _learn(self, peer: _Peer, fetch: Fetch, began: float) -> None:
        stale = began - peer.measured > RETRY_AFTER
        peer.measured, peer.transport = max(began, peer.measured), fetch.transport
        if fetch.transport not in peer.rates:  # this fetch opened the link
            peer.rates[fetch.transport] = None
            return
        rate = LinearFit() if peer.rate is None or stale else peer.rate
        rate.add(len(fetch.committed), fetch.seconds)
        peer.rates[fetch.transport] = rate  # `report` never sees an empty one

    def report(self) -> dict[str, Any]:
        """`Decisions` as JSON."""
        rates = {}
        for donor, peer in list(self._peers.items())[-_MAX_REPORTED:]:
            rate = peer.rate
            if rate is not None:
                per_row = rate.slope
                if per_row is None:
                    per_row = rate.y / rate.x
                rates[donor] = {
                    "transport": peer.transport,
                    "overhead_s": rate.y - per_row * rate.x,
                    "bytes_per_s": self._row_bytes / per_row if per_row else None,
                }
        left_out = [*self._left_out.items()][-_MAX_REPORTED:]
        return {
            **asdict(self.decisions),
            "rates": rates,
            "left_out": {donor: peer.reason for donor, peer in left_out},
        }

"""What computing and fetching cost, measured; see "Fetch or compute" in `docs/how-it-works.md`.

`PrefillRate` is how fast this engine computes prompts. Only steps with many prompt tokens count.
The rate is the sum of their tokens over the sum of their seconds: if vLLM reads a step's output
late, that step seems too long and the next one too short. A token takes longer the deeper it is,
because attention covers all tokens before it; a line through the latest steps measures by how much.

`StepCost` is how long this engine takes for a step that only decodes, which depends on how many
requests it runs.

`CostModel` predicts how long fetches from each peer take, and which peers to leave out.

Belongs to the scheduler thread; any thread may read, and call `report`. Times are monotonic
seconds.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from statistics import fmean
from typing import Any, NamedTuple

from xinference_xavier.pool.tier import DISK, Fetch
from xinference_xavier.stats.schema import Decisions

_WEIGHT = 0.2  # of the newest point: about the last ten count
_MIN_SPREAD = 0.05  # variance of x over its squared mean


def _slope(x: float, y: float, variance: float, covariance: float) -> float | None:
    """The slope of the line through points with the means `x` and `y`: at least 0 and at most
    y / x, so that the line is never negative for x > 0. None while all x are about equal."""
    if variance <= _MIN_SPREAD * x**2:
        return None
    return min(max(covariance / variance, 0.0), y / x)


class LinearFit:
    """A decaying linear fit of y over x. `x` and `y` are the weighted means."""

    def __init__(self) -> None:
        self.x = 0.0
        self.y = 0.0
        self._count = 0
        self._variance = 0.0
        self._covariance = 0.0

    def add(self, x: float, y: float) -> None:
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        more_x, more_y = x - self.x, y - self.y
        self.x += weight * more_x
        self.y += weight * more_y
        self._variance = (1 - weight) * (self._variance + weight * more_x**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_x * more_y)

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def slope(self) -> float | None:
        """None while all x are about equal."""
        return _slope(self.x, self.y, self._variance, self._covariance)

    def predict(self, x: float) -> float:
        """y at `x`, 0 without points. While all x are about equal, the least that any such line has
        there: y is constant above them and proportional below."""
        slope = self.slope
        if slope is None:
            return self.y * min(1.0, x / self.x) if self.x else 0.0
        return max(0.0, self.y + slope * (x - self.x))  # rounding can make it less

    def largest(self, y: float) -> float:
        """The x up to which the prediction is at most `y`: 0 where even that is more."""
        slope = self.slope
        if slope:
            return max(0.0, self.x + (y - self.y) / slope)
        if y >= self.y:
            return math.inf
        return 0.0 if slope is not None or y <= 0 else self.x * y / self.y


_MIN_TOKENS = 256
_RATE_WEIGHT = 0.2  # of the newest step: about the last ten count


class PrefillRate:
    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self._tokens = 0.0  # mean per step
        self._seconds = 0.0
        self._fit = LinearFit()  # seconds per token over depth

    def add(self, tokens: int, seconds: float, depth: float = 0.0) -> None:
        """Count a step of `tokens` prompt tokens, with `depth` tokens before each on average."""
        if tokens < _MIN_TOKENS or seconds <= 0:
            return
        weight = 1.0 if self.tokens_per_second is None else _RATE_WEIGHT
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self.tokens_per_second = self._tokens / self._seconds
        self._fit.add(depth, seconds / tokens)

    def seconds(self, first: int, last: int) -> float | None:
        """Predict how long it takes to compute a prompt's tokens from `first` up to `last`.

        None before the first measurement. Depth is ignored while all steps were about equally deep.
        """
        if (line := self.line()) is None:
            return None
        token_s, depth_s = line
        return (last - first) * (token_s + depth_s * (first + last) / 2)

    def line(self) -> tuple[float, float] | None:
        """Seconds that a prompt's first token takes, and how much longer a token takes for each
        before it. None before the first measurement."""
        if self.tokens_per_second is None:
            return None
        slope = self._fit.slope  # another thread may change it
        if not slope:
            return 1 / self.tokens_per_second, 0.0
        return self._fit.predict(0.0), slope


_STEPS = 50
"""About the latest so many steps count, which take a second or two. If vLLM reads an output late,
that step seems twice as long, and a mean of so many 2 % longer."""


@dataclass(slots=True)
class _MeanStep:
    """Means over the latest steps with about as many requests."""

    count: int = 0  # up to `_STEPS`
    requests: float = 0.0
    seconds: float = 0.0


class StepCost:
    """The line through the mean steps with 1, 2 to 3, 4 to 7 and so on requests. What was measured
    with few requests counts on while there are many, and the other way round.

    The seconds are those in which each answer gets one token. With speculative decoding, answers
    get several in a step: its seconds are divided by their mean number.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, _MeanStep] = {}
        self._tokens = 1.0  # of an answer in a step, on average

    def add(self, requests: int, seconds: float, tokens: int | None) -> None:
        """Count a step that only decoded, for so many requests, which got so many tokens together;
        None if that is unknown."""
        steps = self._by_size.get(requests.bit_length())
        if steps is None:
            steps = self._by_size[requests.bit_length()] = _MeanStep()
        if steps.count < _STEPS:
            steps.count += 1
        steps.requests += (requests - steps.requests) / steps.count
        steps.seconds += (seconds - steps.seconds) / steps.count
        if tokens is not None:
            self._tokens += (tokens / requests - self._tokens) / _STEPS

    def line(self) -> tuple[float, float] | None:
        """Seconds for a token of each answer: without requests, and for each running one. None
        before the first measurement. While all steps had about as many requests, these count for
        nothing."""
        steps = [*self._by_size.values()]  # the scheduler thread may add one
        if not steps:
            return None
        counts = [each.count for each in steps]
        sizes = [each.requests for each in steps]
        mean = partial(fmean, weights=counts)
        x, y = mean(sizes), mean([each.seconds for each in steps])
        variance = mean([(size - x) ** 2 for size in sizes])
        covariance = mean([(each.requests - x) * (each.seconds - y) for each in steps])
        slope = _slope(x, y, variance, covariance) or 0.0
        return max(0.0, y - slope * x) / self._tokens, slope / self._tokens


RETRY_AFTER = 30.0
"""Seconds after the last fetch from a peer for which its rate counts. They double whenever the next
fetch turns out slower than computing again."""
MAX_RETRY_AFTER = 32 * RETRY_AFTER
MAX_FAILURES = 2  # in a row, before a peer is left out
MAX_PAUSE = 60.0  # seconds between two probes
_BLAMELESS = frozenset({"not held", "not compared", "donor gone", "reset", "stopped"})
"""Reasons for which a fetch is rolled back that say nothing about the donor."""
_PATIENCE, _MIN_PATIENCE = 4.0, 1.0  # predictions and seconds that a fetch may take
_MAX_PEERS, _MAX_REPORTED = 1000, 100
_UNKNOWN = LinearFit()


class _Begun(NamedTuple):
    at: float
    prefill_seconds: float | None  # that it saves, if that is known


@dataclass
class _Peer:
    tried: float = 0.0  # when the latest fetch began
    measured: float = 0.0  # when the latest measured fetch began
    transport: str = ""  # of the latest measured fetch
    rates: dict[str, LinearFit] = field(default_factory=dict)  # seconds over rows, by transport
    retry_after: float = RETRY_AFTER
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
        self._pending: dict[Fetch, _Begun] = {}
        self._left_out: dict[str, _Peer] = {}

    def rate(self, donor: str, now: float = -math.inf) -> LinearFit:
        """Seconds over rows of fetches from `donor`; empty if unknown, so that it predicts 0.

        Without `now`, it counts however old it is."""
        peer = self._peers.get(donor)
        return _UNKNOWN if peer is None or now - peer.tried > peer.retry_after else peer.rate

    def patience(self, donor: str, rows: int, now: float) -> float:
        """How many seconds to wait for a fetch from `donor`; infinite if its rate is unknown."""
        rate = self.rate(donor, now)
        return max(_MIN_PATIENCE, _PATIENCE * rate.predict(rows)) if rate else math.inf

    def measured(self, now: float) -> list[str]:
        """The peers whose rates are known, the latest tried first."""
        latest = reversed(self._peers.items())
        recent = takewhile(lambda each: now - each[1].tried <= MAX_RETRY_AFTER, latest)
        return [name for name, peer in recent if peer.rate and now - peer.tried <= peer.retry_after]

    def left_out(self, probe_by: float = math.inf) -> list[str]:
        """The peers that are left out and may be probed at the time `probe_by`."""
        return [name for name, peer in self._left_out.items() if peer.probe_at <= probe_by]

    def begun(self, fetch: Fetch, prefill_seconds: float | None, now: float) -> None:
        """A fetch began that saves `prefill_seconds` of computing, if that is known."""
        self._pending[fetch] = _Begun(now, prefill_seconds)
        peer = self._peers.setdefault(fetch.source, _Peer())
        peer.tried = now
        peer.probe_at = math.inf  # not before this one has ended
        self._peers.move_to_end(fetch.source)
        if len(self._peers) > _MAX_PEERS:
            oldest, _ = self._peers.popitem(last=False)
            self._left_out.pop(oldest, None)

    def ended(self, fetch: Fetch, now: float) -> None:
        """Learn from the fetch; further calls for it do nothing."""
        begun, peer = self._pending.pop(fetch, None), self._peers.get(fetch.source)
        if begun is None or peer is None:
            return
        if not fetch.committed:
            self._failed(peer, fetch, now)
            return
        if self._left_out.pop(fetch.source, None):
            peer.rates.clear()
        peer.failures = 0
        prefill = begun.prefill_seconds
        is_slower = prefill is not None and fetch.seconds > prefill
        self.decisions.slower_than_prefill += is_slower
        self._learn(peer, fetch, begun.at, is_slower)

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

    def _learn(self, peer: _Peer, fetch: Fetch, began: float, is_slower: bool) -> None:
        opened_link = fetch.transport not in peer.rates and fetch.source != DISK
        stale = began - peer.measured > peer.retry_after
        if opened_link or not is_slower:
            peer.retry_after = RETRY_AFTER
        elif stale and peer.rate:
            peer.retry_after = min(2 * peer.retry_after, MAX_RETRY_AFTER)
        peer.measured, peer.transport = max(began, peer.measured), fetch.transport
        if stale or fetch.transport not in peer.rates:
            peer.rates[fetch.transport] = LinearFit()
        if not opened_link:
            peer.rate.add(len(fetch.committed), fetch.seconds)

    def rates(self) -> dict[str, dict[str, Any]]:
        """The measured rates of the peers tried last; JSON-able."""
        rates = {}
        for donor, peer in [*self._peers.items()][-_MAX_REPORTED:]:
            if rate := peer.rate:
                per_row = rate.y / rate.x if rate.slope is None else rate.slope
                rates[donor] = {
                    "transport": peer.transport,
                    "overhead_s": rate.y - per_row * rate.x,
                    "bytes_per_s": self._row_bytes / per_row if per_row else None,
                }
        return rates

    def report(self, set_of: Callable[[Sequence[str]], int]) -> dict[str, Any]:
        """`Decisions` as JSON, but for the sources left out that `set_of` no longer knows: they
        have left, and nobody can mend them."""
        left_out = {name: peer.reason for name, peer in [*self._left_out.items()] if set_of([name])}
        reasons = dict([*left_out.items()][-_MAX_REPORTED:])
        return {**asdict(self.decisions), "left_out": reasons}

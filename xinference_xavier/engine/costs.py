"""What computing and fetching cost, measured; see "Fetch or compute" in `docs/how-it-works.md`.

`PrefillRate` is how fast this engine computes prompts. Only steps with many prompt tokens count.
The rate is the sum of their tokens over the sum of their seconds: if vLLM reads a step's output
late, that step seems too long and the next one too short. A token takes longer the deeper it is,
because attention covers all tokens before it; a line through the latest steps measures by how much.

`StepCost` is how long this engine takes for a step that only decodes, which depends on how many
requests it runs.

`CostModel` learns what fetches from each source take; each `Source` has what was learnt of it.

Belongs to the scheduler thread; any thread may read, and call `report`. Times are monotonic
seconds.
"""

from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from xinference_xavier.peers import Peers, Source
from xinference_xavier.replica.fetcher import Fetch
from xinference_xavier.runtime.linear_fit import LinearFit, slope_of
from xinference_xavier.stats.schema import Decisions

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
        slope = slope_of(x, y, variance, covariance) or 0.0
        return max(0.0, y - slope * x) / self._tokens, slope / self._tokens


_MAX_REPORTED = 100


class _Begun(NamedTuple):
    source: Source
    at: float
    prefill_seconds: float | None  # that it saves, if that is known


class CostModel:
    """Learns from each fetch what its source is worth."""

    def __init__(self, peers: Peers, *, row_bytes: int) -> None:
        self.decisions = Decisions()
        self._peers = peers
        self._row_bytes = row_bytes
        self._pending: dict[Fetch, _Begun] = {}

    def begun(
        self, fetch: Fetch, source: Source, prefill_seconds: float | None, now: float
    ) -> None:
        """A fetch began that saves `prefill_seconds` of computing, if that is known."""
        self._pending[fetch] = _Begun(source, now, prefill_seconds)
        source.begun(now)

    def ended(self, fetch: Fetch, now: float) -> None:
        """Learn from the fetch; further calls for it do nothing."""
        if (begun := self._pending.pop(fetch, None)) is None:
            return
        source, at, prefill = begun
        if not fetch.committed:
            source.failed(len(fetch.rows), fetch.seconds, fetch.reason or "", now)
            return
        is_slow = prefill is not None and fetch.seconds > prefill
        self.decisions.slower_than_prefill += is_slow
        source.arrived(len(fetch.committed), fetch.seconds, fetch.transport, at, is_slow)

    def rates(self) -> dict[str, dict[str, Any]]:
        """The measured rates of the sources tried last; JSON-able."""
        rates = {}
        for source in self._latest():
            if rate := source.rate():
                per_row = rate.y / rate.x if rate.slope is None else rate.slope
                rates[source.name] = {
                    "transport": source.transport,
                    "overhead_s": rate.y - per_row * rate.x,
                    "bytes_per_s": self._row_bytes / per_row if per_row else None,
                }
        return rates

    def report(self) -> dict[str, Any]:
        """`Decisions` as JSON."""
        left_out = {each.name: each.outage.reason for each in self._latest() if each.outage.is_on}
        return {**asdict(self.decisions), "left_out": left_out}

    def _latest(self) -> list[Source]:
        """The sources tried last: a heartbeat carries them."""
        return sorted(self._peers.sources(), key=lambda each: each.tried)[-_MAX_REPORTED:]
